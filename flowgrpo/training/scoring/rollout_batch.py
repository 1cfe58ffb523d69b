"""The samples of an iteration, as the loop sees them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.scoring.scorer import Scores


class Batch(Protocol):
    """What this process rolled out in an iteration, decoded and scored."""

    @property
    def groups(self) -> Groups:
        """Those of the iteration, on all processes."""

    @property
    def scores(self) -> Scores:
        """Rewards of the samples."""

    @property
    def outcomes(self) -> tuple[torch.Tensor, list[int]]:
        """Rewards (E, R) of the trajectories that the policy made by itself, and the group of each."""

    @property
    def decoded(self) -> int:
        """How many samples were decoded for it."""

    @property
    def counts(self) -> dict[str, int]:
        """Further numbers for the metrics, which are summed over the processes."""


@dataclass(frozen=True)
class Made:
    """A process's samples of an iteration.

    Attributes:
        evaluations: of the model, that they took.
        seconds: that they took.
    """

    batch: Batch
    evaluations: int
    seconds: float


class Rollouts(Protocol):
    """Where a run's samples come from: this process, or generators that roll out ahead."""

    def next(self, iteration: int) -> Made:
        """Return this process's samples of an iteration."""

    def ended(self) -> AbstractContextManager[object]:
        """Return a context at whose end whoever else rolls out ends, too."""
