"""Retry a step that ran out of memory: first without kept graphs, then with half the batch size.

A rollout, an evaluation, or the gradient of an optimizer step is made again from its start: no weight, moment or statistic
changes before its end. Memory that runs out inside the optimizer's step is not retried. One process alone retries. Several
processes meet in the middle of each step, so such a run ends, and says the batch size to resume with.
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
from flowgrpo.training.run.out_of_memory import OutOfMemory
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
    """Attempts at work whose memory may run out."""

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
        """Return the result of some work, made again with less where it runs out of memory.

        Args:
            key: which size of calls the work has, `UPDATE` or `ROLLOUT`.
            work: changes nothing that lasts but gradients, the global generators and the count of evaluations.
            within: whether it belongs to the iteration under way, so that a resume from there makes it again.
            undo: forgets what the failed attempt made.
            give_up: frees what can be done without, and says so; returns None where there is nothing.

        Raises:
            Exception: whatever the work raises; memory that runs out with nothing left to spare.
        """
        run = self._run
        if not self._alone:
            return work()
        while True:
            state, evaluations = random_state(), run.evaluations
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error) or getattr(error, "half_a_step_taken", False):
                    raise
                phase, spared = getattr(error, "phase", None), give_up()
                # Smaller calls of the model do not help a reward.
                halved = None if spared or phase == "rewards" else self._batch_sizes.halved(key)
                if not (spared or halved):
                    raise
            # Outside the handler, because the error holds the tensors of the failed call.
            undo()
            set_random_state(state)
            run.evaluations = evaluations
            self._batch_sizes.drop_gradients()
            free(run.accelerator.device)
            if halved:
                self._batch_sizes.hold(run.done + within, halved, "out of memory")
            phase = phase or (now.name if (now := phases.current_phase()) else key)
            less = spared or " and ".join(f"train.{name} is {rows}" for name, rows in (halved or {}).items())
            run.report.warn(
                f"step {run.done + within}: out of memory in the {phase} phase; {less} from here on, "
                "and what was under way is made again"
            )


@dataclass(frozen=True)
class ModelCalls:
    """The functions of a wing that call its model."""

    rollout: Rollout
    minibatches: Callable[[Any, Compared], Minibatches]
    eval_samples: Callable[[], list[Sample]]


def guard_calls(wing: Wing, retry: Retry) -> ModelCalls:
    """Return the functions of a wing, each retried with less memory; of several processes none retries."""
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
            # For another size of calls, after an attempt that failed.
            self._retry.attempt(each.sized_by, each.prepare, undo=each.forget)
            return each.step(number)

        give_up = _nothing if number else self._graphs.give_up  # later steps keep no graphs
        return self._retry.attempt(UPDATE, take, undo=each.forget, give_up=give_up)


@contextmanager
def name_sizes(batch_sizes: BatchSizes, graphs: KeptGraphs) -> Iterator[None]:
    """Tell memory that runs out inside this context the found sizes of the run, and whether it kept graphs."""
    try:
        yield
    except OutOfMemory as error:
        error.sizes, error.kept_graphs = batch_sizes.sizes, graphs.there
        raise
