"""What a kind of model supplies to the training loop: five functions, and hooks between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.fitting.batch_sizes import ProbeCalls
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.reports.samples import Sample
from flowgrpo.training.reports.tree_store import KeptTree
from flowgrpo.training.scoring.rollout_batch import Batch
from flowgrpo.training.weights.optimizer_step import UpdateStats

Rollout = Callable[[int, Groups], Batch]


@dataclass(frozen=True)
class Compared:
    """Advantages of this process's units.

    Attributes:
        units: what is compared.
        advantages: (U,) of the units.
        trained: (U,) bool, whether the edges of each are trained on.
        line: metrics of the rewards and of the groups.
    """

    units: CreditUnits
    advantages: torch.Tensor
    trained: torch.Tensor
    line: dict[str, Any]


class Minibatches(ABC):
    """The optimizer steps of one iteration.

    Attributes:
        sized_by: key of `train` that sizes the calls of `prepare`.
    """

    sized_by: str

    @abstractmethod
    def prepare(self) -> None:
        """Build what the steps are made of, unless it is there."""

    def forget(self) -> None:
        """Drop what `prepare` built where it depends on the size of calls; by default it does not."""
        return

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def tree_records(self) -> list[KeptTree]:
        """Return this process's parts of the trees or texts that the run keeps of the iteration, once prepared."""

    @abstractmethod
    def step(self, number: int) -> UpdateStats:
        """Take an optimizer step, and return its statistics on this process."""


class KeptGraphs:
    """What the rollouts of a run keep for its update and can do without: here nothing."""

    @property
    def there(self) -> bool:
        """Whether a rollout's graphs are in memory."""
        return False

    def give_up(self) -> str | None:
        """Keep no graphs from now on; return what that means for the user, None where there are none to give up."""
        return None

    def state(self) -> Any:
        """Return what a resume must know, as JSON; None for nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Take over what `state` returned when a checkpoint was written."""
        return


class Wing(ABC):
    """The model-specific half of training: how samples are made, credited and learnt from.

    Attributes:
        kept_graphs: of its rollouts.
    """

    kept_graphs: KeptGraphs

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
    def minibatches(self, batch: Any, compared: Compared) -> Minibatches:
        """Return the optimizer steps of an iteration, none of them prepared."""

    @abstractmethod
    def eval_samples(self) -> list[Sample]:
        """Sample each evaluation prompt with the weights as they are; return the samples of all processes."""

    @abstractmethod
    def probe_calls(self) -> ProbeCalls:
        """Return the calls that batch sizes are tried with; they change nothing but gradients."""

    def session(self) -> AbstractContextManager[object]:
        """Return a context in which the whole run takes place."""
        return nullcontext()

    def start(self, rollout: Rollout, to_come: Callable[[int], int]) -> None:
        """Do what comes before the first evaluation, or before a resumed run goes on.

        Args:
            rollout: rolls out, and again with less where memory runs out.
            to_come: bytes that the run will still allocate, given the bytes of one call.
        """
        return

    def observe(self, units: CreditUnits, batch: Any) -> dict[str, Any]:
        """Learn from the compared units of all processes; return metrics of this kind of model alone."""
        return {}

    def after_update(self, moved: dict[str, Any]) -> None:
        """Adapt to the policy's metrics after the optimizer steps of an iteration."""
        return

    def rollout_state(self) -> Any:
        """Return what a rollout depends on beside the weights and the prompt statistics."""
        return None

    def restore_rollout_state(self, state: Any) -> None:
        """Take over what `rollout_state` returned elsewhere."""
        return

    def copies_to_come(self) -> int:
        """Return bytes of copies of the networks that rollouts will make, and have not yet."""
        return 0
