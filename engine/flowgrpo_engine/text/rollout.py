"""Rollouts of texts by engines: request completions, check them, and rebuild the rollout of our own decoder."""

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
from flowgrpo.training.distributed.assignment import Member
from flowgrpo.training.run.phases import phase
from flowgrpo_engine.asking import seed_of
from flowgrpo_engine.service import KEY, EngineError, naming
from flowgrpo_engine.text.adapters import Adapters
from flowgrpo_engine.text.answer import Asked, Sent, read
from flowgrpo_engine.text.request import request_of
from samplers.batches import batched

Tensor = torch.Tensor

A_TOKEN = 256  # largest size in bytes of a token in an answer: its text and three numbers
HEADERS = 2**20  # bytes of an answer besides its tokens


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """Completions by engines.

    Attributes:
        rollout: the completions, with log-probabilities of the trained policy if requested, else 0.
        engine: (B, L) log-probability of each token under the engine, NaN where it has none; None if not requested.
    """

    rollout: Rollout
    engine: Tensor | None


class EngineRollout:
    """Rollouts of a policy by engines.

    Args:
        section: `run.engine`.
        predictor: the trained model, which scores the engines' completions.
        decoder: decoder of training: how tokens are drawn, and in which blocks.
        adapters: pushes the predictor's adapters.
    """

    def __init__(self, section: Engine, predictor: MaskPredictor, decoder: Decoder, adapters: Adapters):
        self.section, self.predictor, self.decoder, self.adapters = section, predictor, decoder, adapters
        self.client = adapters.client

    def try_out(self, prompts: tuple[Tensor, Tensor]) -> None:
        """Request one completion without adapters, to check that tokens and steps fit the model and its blocks.

        Args:
            prompts: (1, P) tokens of one prompt, and their mask (1, P) bool.

        Raises:
            InputError: they do not, or the engine does not answer as it should.
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
            prompts: (B, P) tokens, padded on the left, and their mask (B, P) bool.
            members: (B,) group of each prompt, and its index in the group; prompts of a group are consecutive.
            seed: seed of the run.
            iteration: the iteration, counted from 0.
            adapter: name of the adapter that was pushed last; None for the model alone.
            scored: whether our model computes the log-probability of each token at the step that committed it.
            micro_batch: largest number of rows that are scored together.

        Raises:
            EngineError: an engine did not answer, or sent something else than was requested.
        """
        ids, seen = prompts
        call = secrets.token_hex(4)  # an engine may still work on requests of this run from before it was killed
        asked = [
            Asked(
                name=f"{self.adapters.name}-{iteration}-{group}-{index}-{call}",
                prompt=ids[row][seen[row]].tolist(),
                seed=seed_of(seed, iteration, group) + index,
            )
            for row, (group, index) in enumerate(members)
        ]
        sent = self._complete(asked, members, adapter)
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
        return Rolled(rollout=rollout, engine=_align_log_probs(sent, rollout) if self.section.log_probs else None)

    def _complete(self, asked: Sequence[Asked], members: Sequence[Member], adapter: str | None) -> list[Sent]:
        """Request completions, those of a group together, and check the answers."""
        parts = []
        for _, members_of_group in groupby(zip(asked, members, strict=True), key=lambda each: each[1][0]):
            of_group = [each for each, _ in members_of_group]
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


def _align_log_probs(sent: Sequence[Sent], rollout: Rollout) -> Tensor:
    """Return the engine's log-probabilities (B, L) of tokens, NaN behind the end of each completion."""
    engine = torch.full_like(rollout.commit_logp, torch.nan)
    for row, each in enumerate(sent):
        engine[row, : len(each.tokens)] = torch.tensor(each.log_probs, dtype=engine.dtype)
    return engine
