"""What a kind of model supplies to the training loop: its steps, and what it may add between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.prompt_groups import Groups
from flowgrpo.training.fitting.batch_sizes import ProbeCalls
from flowgrpo.training.reports.samples import Sample
from flowgrpo.training.scoring.rollout_batch import Batch
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.weights.trained_weights import Weights


class Steps(ABC):
    """The steps of an iteration that depend on the model.

    Attributes:
        weights: what is trained.
        policy: the model that has them, which counts its evaluations.
    """

    weights: Weights
    policy: Any

    def rollout_state(self) -> Any:
        """What a rollout depends on, beside the weights and the prompt stats; by default nothing."""
        return None

    def take_rollout_state(self, state: Any) -> None:
        """Take over what `rollout_state` returned elsewhere; by default there is nothing."""
        return

    def own_state(self) -> Any:
        """What a resume goes on with that changes no number of the model, as JSON; by default nothing."""
        return None

    def take_own_state(self, state: Any) -> None:
        """Take over what `own_state` returned when a checkpoint was written; by default there is nothing."""
        return

    def copies_to_come(self) -> int:
        """Bytes of copies of the networks that rollouts will make, and have not yet; by default there are none."""
        return 0

    @abstractmethod
    def rollout(self, iteration: int, groups: Groups) -> Batch:
        """Sample this process's share of the roots, decode and score the samples, and return them.

        Args:
            iteration: with the seed of the run, the head of the address of every random number of the rollout.
            groups: of the iteration, on all processes.
        """

    @abstractmethod
    def units(self, batch: Any) -> CreditUnits:
        """Return the units of a batch that are compared with each other: trajectories, branches, gains of steps."""

    @abstractmethod
    def update(
        self, batch: Any, units: CreditUnits, advantages: torch.Tensor, trained: torch.Tensor
    ) -> list[UpdateStats]:
        """Take the optimizer steps of an iteration; return the statistics of each on this process.

        Args:
            advantages: (U,) of the units.
            trained: (U,) bool, whether the edges of each are trained on.
        """

    @abstractmethod
    def eval_samples(self) -> list[Sample]:
        """Sample each evaluation prompt with the weights as they are; return the samples of all processes."""

    @property
    def evaluations(self) -> int:
        """Model evaluations of this process so far."""
        return self.policy.evaluations

    @evaluations.setter
    def evaluations(self, count: int) -> None:
        self.policy.evaluations = count

    @abstractmethod
    def probe_calls(self) -> ProbeCalls:
        """The calls of the model that sizes of batches are tried with; they change nothing but gradients."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer moves, as it takes it; a kind may give some parameters a learning rate of their own."""
        return [{"params": self.weights.parameters}]

    def on_start(self) -> None:
        """Do what comes before the first evaluation, or before a resumed run goes on; by default nothing."""
        return

    def on_updated(self, moved: dict[str, Any]) -> None:
        """Adapt to the policy's metrics after the optimizer steps of an iteration; by default nothing."""
        return

    def on_compared(self, units: CreditUnits) -> None:
        """Learn from the units of all processes, once their advantages are known; by default nothing."""
        return
