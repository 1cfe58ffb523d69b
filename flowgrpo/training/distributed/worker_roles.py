"""Roles of ranks: the first ranks train, the next generate (`run.generators`), the last evaluate (`run.evaluators`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.errors import InputError
from flowgrpo.schema.readable import counted
from flowgrpo.schema.sections import Run

KEY, OF_EVALUATION = "run.generators", "run.evaluators"


@dataclass(frozen=True)
class Roles:
    """The numbers of trainers, generators (which only roll out) and evaluators.

    With fewer generators than trainers, each generator rolls out for several trainers. With more, several generators take
    turns for one trainer, by iteration.
    """

    trainers: int
    generators: int = 0
    evaluators: int = 0

    @property
    def ranks_of_evaluators(self) -> range:
        """The ranks of evaluators."""
        first = self.trainers + self.generators
        return range(first, first + self.evaluators)

    def generates(self, rank: int) -> bool:
        """Return whether a rank is a generator."""
        return self.trainers <= rank < self.trainers + self.generators

    def evaluates(self, rank: int) -> bool:
        """Return whether a rank is an evaluator."""
        return rank in self.ranks_of_evaluators

    def samples_held_out(self, rank: int) -> bool:
        """Return whether a rank samples held-out prompts: evaluators, or trainers if there are no evaluators."""
        return self.evaluates(rank) if self.evaluators else rank < self.trainers

    def trainers_served(self, rank: int, iteration: int) -> list[int]:
        """Return the ranks of the trainers for which generator `rank` rolls out in an iteration."""
        number = rank - self.trainers
        if self.generators <= self.trainers:
            return list(range(number, self.trainers, self.generators))
        return [number % self.trainers] if iteration % self.turns == number // self.trainers else []

    def ever_served(self, rank: int) -> list[int]:
        """Return the ranks of the trainers for which generator `rank` rolls out in some iteration, sorted."""
        return sorted({served for iteration in range(self.turns) for served in self.trainers_served(rank, iteration)})

    @property
    def turns(self) -> int:
        """The number of generators that take turns for one trainer."""
        return max(1, self.generators // self.trainers)

    def generator_for(self, trainer: int, iteration: int) -> int:
        """Return the rank of the generator that rolls out for a trainer in an iteration."""
        ranks = range(self.trainers, self.trainers + self.generators)
        return next(rank for rank in ranks if trainer in self.trainers_served(rank, iteration))


def assign_roles(run: Run, processes: int) -> Roles:
    """Return the roles of a run's processes. Raises InputError as `check`."""
    check(run, processes)
    return Roles(run.trainers(processes), run.generators, run.evaluators)


def check(run: Run, processes: int) -> None:
    """Raise InputError if the numbers of generators and evaluators do not fit the processes or other options."""
    processes -= run.evaluators
    generators, trainers = run.generators, processes - run.generators
    if run.evaluators:
        if processes < 1 + generators:
            raise InputError(
                f"{OF_EVALUATION}: {run.evaluators} of {counted(processes + run.evaluators, 'process')} leave none "
                f"that trains, take fewer, or more run.processes"
            )
        _check_whole(run, OF_EVALUATION, "an evaluator")
    if not generators:
        return
    if trainers < 1:
        raise InputError(
            f"{KEY}: {generators} of {counted(processes, 'process')} leave none that trains, take {_fitting(processes)}"
        )
    if max(generators, trainers) % min(generators, trainers):
        raise InputError(
            f"{KEY}: {generators} that generate for {trainers} that train cannot be shared out evenly, of {processes} "
            f"processes take {_fitting(processes)}"
        )
    turns = generators // trainers
    if turns > 1 and run.staleness < turns:
        raise InputError(
            f"run.staleness: {turns} generators for each process that trains work on {turns} iterations at once, take "
            f"{turns} or more, or fewer {KEY}"
        )
    _check_whole(run, KEY, "a generator")


def _check_whole(run: Run, key: str, role: str) -> None:
    if run.sharding != "none":
        raise InputError(f"{key}: {role} has whole networks, set run.sharding=none, or {key}=0")
    if run.context_parallel > 1:
        raise InputError(f"{key}: {role} calls a network alone, set run.context_parallel=1, or {key}=0")


def _fitting(processes: int) -> str:
    """List, as text, the numbers of generators that can be shared out evenly among `processes`."""
    choices: Sequence[int] = [n for n in range(1, processes) if max(n, processes - n) % min(n, processes - n) == 0]
    return " or ".join(map(str, choices)) if choices else "more run.processes"
