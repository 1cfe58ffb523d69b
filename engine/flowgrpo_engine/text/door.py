"""Entry points for engine rollouts of a language model: refuse unsupported runs, contact the engines, roll out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Rollout
from flowgrpo.mdlm.models.lora_targets import write_adapter
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.rollouts.rollout import scores_engine
from flowgrpo.schema.engine import Engine
from flowgrpo.training.distributed.assignment import Member
from flowgrpo.training.state import RunState
from flowgrpo.training.weights.trained_weights import Weights
from flowgrpo_engine import asking
from flowgrpo_engine.text import correction, request
from flowgrpo_engine.text.adapters import Adapters
from flowgrpo_engine.text.client import Client
from flowgrpo_engine.text.rollout import EngineRollout


@dataclass(frozen=True)
class Drawn:
    """An engine's log-probabilities of the tokens that it sampled.

    Attributes:
        old: (B, L) log-probability of each token under the trained policy, at the step that committed it.
        log_probs: the same under the engine, NaN where it has none.
        truncate: the largest weight of a token.
    """

    old: torch.Tensor
    log_probs: torch.Tensor
    truncate: float

    @property
    def correction(self) -> torch.Tensor:
        """Weight (B, L) of each token; see `correction.token_weights`."""
        return correction.token_weights(self.old, self.log_probs, self.truncate)

    def line(self, run: RunState, scored: torch.Tensor) -> dict[str, Any]:
        """Return the metrics of the mismatch over all processes.

        Args:
            scored: (B, L) bool, the tokens that are trained on.
        """
        gap = correction.mismatch(self.old, self.log_probs, scored, self.truncate)
        return asking.report_mismatch(run, gap, unit="token", same="model, precision and blocks")


@dataclass(frozen=True)
class Door:
    """Completions by engines in place of a policy."""

    rollout: EngineRollout
    policy: TextPolicy

    def roll_out(
        self, run: RunState, members: Sequence[Member], texts: Sequence[str], *, iteration: int, micro_batch: int
    ) -> tuple[Rollout, Drawn | None]:
        """Return completions of prompts, and the engine's log-probabilities, None if it sends none.

        Args:
            members: group of each prompt, and its index in the group.

        Raises:
            EngineLost: an engine is gone, or did something else; raised on all processes.
        """
        engine = self.rollout

        def ask() -> Any:
            adapter, *_ = run.collectives.gather([engine.adapters.pushed])  # only the main process has pushed
            return engine.roll_out(
                self.policy.prompts(texts),
                members,
                seed=run.config.run.seed,
                iteration=iteration,
                adapter=adapter,
                scored=scores_engine(cast("TextConfig", run.config), engine.decoder),
                micro_batch=micro_batch,
            )

        rolled = asking.roll_out(run, engine.adapters, ask)
        if rolled.engine is None:
            return rolled.rollout, None
        return rolled.rollout, Drawn(rolled.rollout.commit_logp, rolled.engine, engine.section.truncate)


def check(settings: TextConfig, prompts: Sequence[Prompt] = ()) -> None:
    """Refuse a run that an engine cannot roll out for.

    Raises:
        InputError: the sentence says what to set instead.
    """
    model = settings.model
    decoder = settings.algorithm.decoder.build(model.length, 0, "algorithm.decoder", block_size=model.block_size)
    request.check(settings, decoder)


def greet(section: Engine) -> None:
    """Contact each engine of a run.

    Raises:
        InputError: an engine does not answer, or answers something else.
    """
    Client(section).greet()


def build(settings: TextConfig, policy: TextPolicy, weights: Weights, prompt: str) -> Door:
    """Return the door of a policy, after a trial: one completion, whose tokens and steps must fit the policy.

    Raises:
        InputError: they do not, or the engine does not answer.
    """
    section, run, predictor = settings.run.engine, settings.run, policy.predictor
    assert section is not None, "asked of runs with an engine"
    folder = run.folder / "engine" if section.folder is None else Path(section.folder)

    def write(out: Path) -> None:
        write_adapter(settings.model, predictor.model, weights, out)

    adapters = Adapters(Client(section), weights, folder, run.name, write=write)
    decoder = settings.algorithm.decoder.build(policy.length, policy.eos_id, "algorithm.decoder", predictor=predictor)
    rollout = EngineRollout(section, predictor, decoder, adapters)
    rollout.try_out(policy.prompts([prompt]))
    return Door(rollout, policy)
