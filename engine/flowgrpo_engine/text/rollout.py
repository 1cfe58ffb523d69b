"""A rollout of texts by an engine: completions are asked for, checked, and read as what our own decoder returns."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.step_maps import rebuild_rollout
from flowgrpo.schema.engine import Engine
from flowgrpo.training.distributed.minibatches import Member
from flowgrpo.training.run.phases import phase
from flowgrpo_engine.asking import seed_of
from flowgrpo_engine.service import KEY, EngineError, naming
from flowgrpo_engine.text.adapters import Adapters
from flowgrpo_engine.text.answer import Asked, Sent, read
from flowgrpo_engine.text.request import request_of
from samplers.batches import batched

Tensor = torch.Tensor

A_TOKEN = 256  # bytes of an answer for each of its tokens, its text and three numbers, at most
HEADERS = 2**20  # bytes beside


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """What an engine completed.

    Attributes:
        rollout: of the completions, with log-probabilities of the trained policy where they are wanted, and 0 elsewhere.
        engine: (B, L) log-probability of each token under the engine, float64, NaN where it has none; None without any.
    """

    rollout: Rollout
    engine: Tensor | None


class EngineRollout:
    """Rollouts of a policy by engines.

    Args:
        section: `run.engine`.
        predictor: what is trained, which scores what the engines send.
        decoder: of training, which says how tokens are drawn, and in which blocks.
        adapters: of the predictor, as the engines have them.
    """

    def __init__(self, section: Engine, predictor: MaskPredictor, decoder: Decoder, adapters: Adapters):
        self.section, self.predictor, self.decoder, self.adapters = section, predictor, decoder, adapters
        self.client = adapters.client

    def try_out(self, prompts: tuple[Tensor, Tensor]) -> None:
        """Ask for one completion without adapters, to see that tokens and steps are those of the model and its blocks.

        Args:
            prompts: (1, P) tokens of one, and where they are.

        Raises:
            InputError: they are not, or the engine does not answer as it should.
        """
        try:
            self.adapters.release()
            self.roll_out(prompts, [(0, 0)], seed=0, iteration=0, adapter=None, scored=False, micro_batch=1)
        except EngineError as error:
            raise InputError(f"{KEY}: {error}") from None

    def roll_out(
        self,
        prompts: tuple[Tensor, Tensor],
        members: Sequence[Member],
        *,
        seed: int,
        iteration: int,
        adapter: str | None,
        scored: bool,
        micro_batch: int,
    ) -> Rolled:
        """Let the engines complete prompts.

        Args:
            prompts: (B, P) tokens, padded on the left, and where they are (B, P) bool.
            members: (B,) group of each, and its index in the group; those of one group follow each other.
            seed: of the run.
            iteration: counted from 0.
            adapter: the name of the one that was pushed last; None for the model as it is.
            scored: whether our model says the log-probability of each token where it was committed.
            micro_batch: most rows that are scored together.

        Raises:
            EngineError: an engine did not answer, or not with what was asked for.
        """
        ids, seen = prompts
        call = secrets.token_hex(4)  # an engine may still be at work on what was asked before this run was killed
        asked = [
            Asked(
                name=f"{self.adapters.name}-{iteration}-{group}-{index}-{call}",
                prompt=ids[row][seen[row]].tolist(),
                seed=seed_of(seed, iteration, group) + index,
            )
            for row, (group, index) in enumerate(members)
        ]
        sent = self._sent(asked, members, adapter)
        with phase("scoring"):
            rollout = rebuild_rollout(
                self.predictor,
                ids,
                [each.tokens for each in sent],
                [each.steps for each in sent],
                length=self.decoder.region.length,
                fill_id=self.decoder.frame.end,
                attention_mask=seen,
                micro_batch=micro_batch,
                scored=scored,
            )
        return Rolled(rollout=rollout, engine=_placed(sent, rollout) if self.section.log_probs else None)

    def _sent(self, asked: Sequence[Asked], members: Sequence[Member], adapter: str | None) -> list[Sent]:
        """Ask for completions, those of a group together, and check every number of the answers."""
        parts = []
        for _, own in groupby(zip(asked, members, strict=True), key=lambda each: each[1][0]):
            of_group = [each for each, _ in own]
            parts += batched(of_group, self.section.samples or len(of_group))
        requests = [request_of(part, self.decoder, self.section, adapter) for part in parts]
        with phase("engine", len(asked)) as asking:
            answers = self.client.completions(requests, HEADERS + A_TOKEN * self.decoder.region.length)
            asking.advance(len(asked))
        decoder, predictor, log_probs = self.decoder, self.predictor, self.section.log_probs
        with naming(self.client.place):
            return [
                read(answer, each, decoder=decoder, predictor=predictor, log_probs=log_probs)
                for part, answer_of_part in zip(parts, answers, strict=True)
                for each, answer in zip(part, answer_of_part, strict=True)
            ]


def _placed(sent: Sequence[Sent], rollout: Rollout) -> Tensor:
    """The engine's log-probabilities (B, L) of tokens, NaN behind the end of each completion."""
    engine = torch.full_like(rollout.commit_logp, torch.nan)
    for row, each in enumerate(sent):
        engine[row, : len(each.tokens)] = torch.tensor(each.log_probs, dtype=engine.dtype)
    return engine
