"""Retry a step that ran out of memory: first without kept graphs, then with half the batch size.

A rollout, an evaluation, or the gradient of an optimizer step is repeated from its start: no weight, moment or
statistic changes before its end. The optimizer's own step is not retried. Only a run of one process retries. Several
processes wait for each other within a step, so their run ends with an error that says the batch size to resume with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from flowgrpo.training.fitting.batch_probing import free
from flowgrpo.training.fitting.batch_sizes import ROLLOUT, UPDATE, BatchSizes
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.reports.samples import Sample
from flowgrpo.training.reports.tree_store import KeptTree
from flowgrpo.training.run import phases
from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from flowgrpo.training.run.random_states import random_state, set_random_state
from flowgrpo.training.scoring.rollout_batch import Batch
from flowgrpo.training.state import RunState
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.wing import Compared, KeptGraphs, Minibatches, Rollout, Wing
from rewards.memory import is_out_of_memory

T = TypeVar("T")


def _nothing() -> None:
    return


class Retry:
    """Retries of work that runs out of memory."""

    def __init__(self, run: RunState, batch_sizes: BatchSizes):
        self._run, self._batch_sizes = run, batch_sizes
        self._alone = run.accelerator.num_processes == 1

    def attempt(
        self,
        key: str,
        work: Callable[[], T],
        *,
        within: bool = True,
        undo: Callable[[], None] = _nothing,
        give_up: Callable[[], str | None] = _nothing,
    ) -> T:
        """Run `work` and return its result; run it again with less memory whenever memory runs out.

        Other errors are raised at once. An out-of-memory error is raised when no memory is left to free and the batch
        size cannot be halved.

        Args:
            key: the batch size to halve, `UPDATE` or `ROLLOUT`.
            work: may change only gradients, the global random states and the counts of evaluations.
            within: whether the work belongs to the current iteration, so that a resume would repeat it.
            undo: drops the results of the failed attempt.
            give_up: frees optional memory and returns a sentence about it; returns None if there is none to free.
        """
        run = self._run
        if not self._alone:
            return work()
        while True:
            state, evaluations, backward = random_state(), run.evaluations, run.backward.count
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error) or getattr(error, "half_a_step_taken", False):
                    raise
                phase, spared = getattr(error, "phase", None), give_up()
                # Smaller calls of the model do not help a reward that runs out of memory.
                halved = None if spared or phase == "rewards" else self._batch_sizes.halve(key)
                if not (spared or halved):
                    raise
            # Free memory outside the handler: the error keeps the tensors of the failed call alive.
            undo()
            set_random_state(state)
            run.evaluations, run.backward.count = evaluations, backward
            self._batch_sizes.drop_gradients()
            free(run.accelerator.device)
            if halved:
                self._batch_sizes.hold(run.done + within, halved, "out of memory")
            phase = phase or (now.name if (now := phases.current_phase()) else key)
            less = spared or " and ".join(f"train.{name} is {rows}" for name, rows in (halved or {}).items())
            run.report.warn(
                f"step {run.done + within}: out of memory in the {phase} phase; {less} from here on, "
                "and the interrupted work is repeated"
            )


@dataclass(frozen=True)
class ModelCalls:
    """The functions of a wing that call its model."""

    rollout: Rollout
    minibatches: Callable[[Any, Compared], Minibatches]
    eval_samples: Callable[[], list[Sample]]


def guard_calls(wing: Wing, retry: Retry) -> ModelCalls:
    """Wrap the wing's functions that call its model, so that each is retried with less memory; see `Retry`."""
    graphs = wing.kept_graphs

    def rollout(iteration: int, groups: Groups) -> Batch:
        work = partial(wing.rollout, iteration, groups)
        return retry.attempt(ROLLOUT, work, within=iteration >= 0, give_up=graphs.give_up)

    def minibatches(batch: Any, compared: Compared) -> Minibatches:
        return GuardedMinibatches(wing.minibatches(batch, compared), retry, graphs)

    def eval_samples() -> list[Sample]:
        return retry.attempt(ROLLOUT, wing.eval_samples, within=False)

    return ModelCalls(rollout, minibatches, eval_samples)


class GuardedMinibatches(Minibatches):
    """Minibatches whose steps are retried with less memory."""

    def __init__(self, minibatches: Minibatches, retry: Retry, graphs: KeptGraphs):
        self._minibatches, self._retry, self._graphs = minibatches, retry, graphs
        self.sized_by = minibatches.sized_by

    @override
    def prepare(self) -> None:
        each = self._minibatches
        self._retry.attempt(each.sized_by, each.prepare, undo=each.forget, give_up=self._graphs.give_up)

    @override
    def __len__(self) -> int:
        return len(self._minibatches)

    @override
    def tree_records(self) -> list[KeptTree]:
        return self._minibatches.tree_records()

    @override
    def step(self, number: int) -> UpdateStats:
        each = self._minibatches

        def take() -> UpdateStats:
            # Prepare again if the last attempt failed: the batch size has changed.
            self._retry.attempt(each.sized_by, each.prepare, undo=each.forget)
            return each.step(number)

        give_up = _nothing if number else self._graphs.give_up  # later steps keep no graphs
        return self._retry.attempt(UPDATE, take, undo=each.forget, give_up=give_up)


@contextmanager
def name_sizes(batch_sizes: BatchSizes, graphs: KeptGraphs) -> Iterator[None]:
    """Return a context that adds the batch sizes, and whether graphs were kept, to an OutOfMemory error."""
    try:
        yield
    except OutOfMemory as error:
        error.sizes, error.kept_graphs = batch_sizes.sizes, graphs.there
        raise
