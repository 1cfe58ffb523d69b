"""Interface between the training loop and a kind of model (a wing): abstract functions, and optional hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

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
    """The credit units of this process with their advantages."""

    units: CreditUnits
    advantages: torch.Tensor  # (U,)
    trained: torch.Tensor  # (U,) bool, whether the unit's edges are trained on
    line: dict[str, Any]  # metrics of the rewards and the groups, over all processes


class Minibatches(ABC):
    """The optimizer steps of one iteration."""

    sized_by: str  # the batch size of the model calls in `prepare`, a key of the section `train`

    @abstractmethod
    def prepare(self) -> None:
        """Build the inputs of the optimizer steps, unless they exist already."""

    def forget(self) -> None:
        """Drop the results of `prepare` that depend on the batch size; by default there are none."""
        return

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def tree_records(self) -> list[KeptTree]:
        """Return this process's part of the trees, or texts, that the run saves. Call after `prepare`."""

    @abstractmethod
    def step(self, number: int) -> UpdateStats:
        """Take optimizer step `number`, counted from 0, and return its statistics on this process."""


class KeptGraphs:
    """Autograd graphs of rollouts, kept for the first update to save evaluations. This base class keeps none."""

    @property
    def there(self) -> bool:
        """Whether a rollout's graphs are in memory."""
        return False

    def give_up(self) -> str | None:
        """Stop keeping graphs; return a phrase about it for the user, or None if there are none to give up."""
        return None

    def state(self) -> Any:
        """Return the state for a checkpoint, as JSON values; None if there is none."""
        return None

    def restore(self, state: Any) -> None:
        """Restore the result of `state` from a checkpoint."""
        return


class RolloutMemory(Protocol):
    """Tensors that later rollouts depend on, equal on all processes."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors for a checkpoint."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `state` from a checkpoint; raise InputError if it is another run's."""


class Wing(ABC):
    """The model-specific half of training: how samples are made, credited and trained on.

    Attributes:
        rollout_memory: tensors that rollouts depend on; None if there are none.
    """

    kept_graphs: KeptGraphs
    rollout_memory: RolloutMemory | None = None

    @abstractmethod
    def rollout(self, iteration: int, groups: Groups) -> Batch:
        """Sample this process's share of the roots, decode and score the samples, and return them.

        `groups` are those of all processes. All random numbers are seeded by the run's seed and the iteration's number.
        """

    @abstractmethod
    def units(self, batch: Any) -> CreditUnits:
        """Return the credit units of a batch: trajectories, branches or step gains, whose rewards are compared."""

    @abstractmethod
    def minibatches(self, batch: Any, compared: Compared) -> Minibatches:
        """Return the optimizer steps of an iteration, not yet prepared."""

    @abstractmethod
    def eval_samples(self) -> list[Sample]:
        """Sample each evaluation prompt with the current weights; return the samples of all processes."""

    @abstractmethod
    def probe_calls(self) -> ProbeCalls:
        """Return the model calls that probe batch sizes; they change only gradients."""

    def session(self) -> AbstractContextManager[object]:
        """Return a context that `Loop.run` enters for the whole run; by default an empty one."""
        return nullcontext()

    def settle(self) -> None:
        """Decide what depends on the batch sizes, on all processes of any role; by default do nothing."""
        return

    def start(self, rollout: Rollout, to_come: Callable[[int], int]) -> None:
        """Prepare the run, before its first evaluation or before a resumed run continues; by default do nothing.

        `rollout` is retried when memory runs out. `to_come` takes the bytes that one model call needs, and returns all
        bytes that the run will still allocate.
        """
        return

    def group_factors(self, batch: Any) -> torch.Tensor | None:
        """Return a factor (G,) of the advantages of each group, None for none; all processes call it together."""
        return None

    def observe(self, units: CreditUnits, batch: Any) -> dict[str, Any]:
        """Adapt later rollouts to the credit units of all processes; return metrics that only this kind of model has."""
        return {}

    def after_update(self, moved: dict[str, Any]) -> None:
        """Adapt to the `policy/*` metrics `moved`, after the optimizer steps of an iteration."""
        return

    def rollout_state(self) -> Any:
        """Return the state that a rollout depends on, except the weights and the prompt statistics."""
        return None

    def restore_rollout_state(self, state: Any) -> None:
        """Restore a result of `rollout_state` that a trainer sent or a checkpoint holds."""
        return

    def copies_to_come(self) -> int:
        """Return the bytes of low-precision copies of networks that rollouts will still allocate."""
        return 0
