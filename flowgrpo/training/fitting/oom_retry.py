"""Work whose memory runs out, made again with less: without the graphs of a rollout, or in calls of half the size.

What a call was part of, a rollout, an evaluation or the gradient of an optimizer step, is made again from its start: no
weight, moment or statistic has changed before its end. Of several processes only the one whose memory ran out does so, with
what it was told by the others before (`training.distributed.replay_journal`). All agree on the smallest size when the
iteration, or the evaluation, has ended. Where processes share the calls of a network, or have roles of their own, none can
begin again by itself: such a run ends, with a size to resume with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from accelerate import Accelerator

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed import replay_journal
from flowgrpo.training.distributed.collectives import Collectives
from flowgrpo.training.fitting.batch_probing import free
from flowgrpo.training.fitting.batch_sizes import ROLLOUT, UPDATE, BatchSizes
from flowgrpo.training.reports.report import Report
from flowgrpo.training.run import phases
from flowgrpo.training.run.out_of_memory import OutOfMemory
from flowgrpo.training.run.random_states import random_state, set_random_state
from rewards.memory import is_out_of_memory

T = TypeVar("T")
S = TypeVar("S")


class NoGraphs:
    """What the rollouts of a run keep for its update and can do without: nothing."""

    @property
    def there(self) -> bool:
        """Whether graphs of a rollout are there, or are being made."""
        return False

    def give_up(self) -> str | None:
        """Let rollouts keep none any more; what follows for the user, or None where there are none or none may go."""
        return None

    def stop(self) -> None:
        """Let rollouts keep none any more, as those of another process."""


class Retried(Protocol):
    """What `Retrying` uses of a `Loop`; see there."""

    accelerator: Accelerator
    config: RunConfig
    collectives: Collectives
    report: Report
    batch_sizes: BatchSizes
    kept_graphs: NoGraphs
    done: int
    evaluations: int


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Shortage:
    """Memory that ran out, and what helped: the sentence that says so, and whether graphs were given up."""

    sentence: str
    gave_up: bool


class Retrying:
    """The attempts of one process at its rollouts, evaluations and optimizer steps.

    Args:
        loop: of this process.
    """

    def __init__(self, loop: Retried):
        self._loop, self._alone = loop, loop.accelerator.num_processes == 1
        self._can = self._alone or loop.config.run.begins_again
        self._shortages: list[Shortage] = []  # of this process, which the others have not been told

    def attempt(
        self,
        key: str,
        work: Callable[[], T],
        *,
        within: bool = True,
        undo: Callable[[], None] = _nothing,
        give_up: Callable[[], str | None] = _nothing,
    ) -> T:
        """What some work returns; where a call of it runs out of memory, made again with less.

        First without what can be given up, then with calls of half the size, where the run has found it.

        Args:
            key: that sets the size of its calls, `UPDATE` or `ROLLOUT`.
            work: which changes nothing that lasts but gradients, the global generators and the count of evaluations.
            within: whether it is a part of an iteration, so that a resume that begins with this one makes it again.
            undo: forget what was made for the failed attempt.
            give_up: let go of what takes memory and can be done without, and say so; None where there is nothing.

        Raises:
            Exception: whatever the work raises; memory that runs out where it cannot be helped.
        """
        if not self._can:
            return work()
        loop = self._loop
        with replay_journal.kept() as notes:
            met = notes.met
            while True:
                state, evaluations = random_state(), loop.evaluations
                try:
                    return work()
                except Exception as error:
                    if not is_out_of_memory(error) or notes.final:
                        raise
                    phase, spared = getattr(error, "phase", None), give_up()
                    # A reward is not asked in these calls, so that smaller ones would not help it.
                    halved = None if spared or phase == "rewards" else loop.batch_sizes.halved(key)
                    if not (spared or halved):
                        raise
                # Out of the handler, for the error holds the tensors of the failed call.
                undo()
                set_random_state(state)
                notes.met = met
                loop.evaluations = evaluations
                loop.batch_sizes.drop_gradients()
                free(loop.accelerator.device)
                self._helped(phase or (now.name if (now := phases.now()) else key), spared, halved, within)

    def steps(
        self,
        held: list[T],
        again: Callable[[], T],
        step: Callable[[T, int], S],
        count: int,
        *,
        undo: Callable[[], None] = _nothing,
        give_up: Callable[[], str | None] = _nothing,
    ) -> list[S]:
        """What some optimizer steps return, each attempted with what was made for the size of calls that holds.

        Args:
            held: what was made for the size that holds now, alone; nobody else holds it, for a failed attempt forgets it.
            again: make it for another.
            step: take one of them, by its number.
            undo: forget what a failed attempt holds beside what was made.
            give_up: as of `attempt`, in the first step.
        """

        def take(number: int) -> S:
            if not held:
                evaluations = self._loop.evaluations
                held.append(self.attempt(ROLLOUT, again))
                self._loop.evaluations = evaluations
            return step(held[0], number)

        def forget() -> None:
            held.clear()
            undo()

        return [  # later steps find nothing that can be given up
            self.attempt(UPDATE, partial(take, number), undo=forget, give_up=_nothing if number else give_up)
            for number in range(count)
        ]

    def agree(self, *, within: bool) -> None:
        """Let all processes go on with the smallest sizes that one of them came to, and say so; all call it together.

        Args:
            within: as of `attempt`.
        """
        if self._alone or not self._can:
            return
        loop = self._loop
        everyone = loop.collectives.gather([(loop.batch_sizes.sizes, self._shortages)])
        self._shortages = []
        happened = [each for _, shortages in everyone for each in shortages]
        if any(each.gave_up for each in happened):
            loop.kept_graphs.stop()
        if not all(each.gave_up for each in happened):
            least = {key: min(sizes[key] for sizes, _ in everyone) for key in loop.batch_sizes.sizes}
            loop.batch_sizes.hold(loop.done + within, least, "out of memory")
        for each in happened:
            loop.report.warn(each.sentence)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Tell memory that runs out inside this context how the run stood: its found sizes, and whether it kept graphs."""
        try:
            yield
        except OutOfMemory as error:
            error.sizes = self._loop.batch_sizes.sizes
            error.kept_graphs = self._loop.kept_graphs.there
            raise

    def _helped(self, phase: str, spared: str | None, halved: dict[str, int] | None, within: bool) -> None:
        """Go on with less, and say so: now, or when processes agree."""
        loop, index = self._loop, self._loop.accelerator.process_index
        less = spared or " and ".join(f"train.{name} is {rows}" for name, rows in (halved or {}).items())
        where = "out of memory" if self._alone else f"process {index} ran out of memory"
        sentence = (
            f"step {loop.done + within}: {where} in the {phase} phase; {less} from here on, "
            "and what was under way is made again"
        )
        if not self._alone:
            self._shortages.append(Shortage(sentence, gave_up=not halved))
            loop.batch_sizes.use(halved or {})
            return
        if halved:
            loop.batch_sizes.hold(loop.done + within, halved, "out of memory")
        loop.report.warn(sentence)
