"""Interfaces of an iteration's samples, and of their source, for the training loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flowgrpo.training.distributed.assignment import Member
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.scoring.scorer import Scores


class Batch(Protocol):
    """The samples of an iteration on this process, decoded and scored."""

    @property
    def groups(self) -> Groups:
        """The groups of the iteration, on all processes."""

    @property
    def scores(self) -> Scores:
        """Rewards of the samples."""

    @property
    def outcomes(self) -> tuple[torch.Tensor, list[Member]]:
        """Rewards (E, R) of the first stage's trajectories that the policy sampled itself, and the root of each.

        A second stage samples hard groups more often, so that its rewards are no fair sample of a prompt's.
        """

    @property
    def decoded(self) -> int:
        """The number of decoded samples."""

    @property
    def counts(self) -> dict[str, int]:
        """Further counts for the metrics, by name; they are summed over processes."""

    def join(self, groups: Groups, further: Any) -> Batch:
        """Return the batch with the samples of a second stage, a batch of the same class; None if this process has none.

        `groups` has the roots of both stages.
        """


@dataclass(frozen=True)
class Made:
    """A process's samples of an iteration, with their cost."""

    batch: Batch
    evaluations: int  # model evaluations of the rollout
    seconds: float  # time of the rollout


class Rollouts(Protocol):
    """The source of a run's samples: this process, or generators that roll out ahead."""

    def next(self, iteration: int) -> Made:
        """Return this process's samples of an iteration."""

    def closing(self) -> AbstractContextManager[object]:
        """Return a context that ends the generators, if any, at its exit."""
