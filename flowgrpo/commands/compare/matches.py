"""Samples of one prompt and seed across runs: before and after training, how far apart they are, how much they changed."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowgrpo.commands.compare.runs import Run
from flowgrpo.commands.gallery.cards import Card, Shown
from flowgrpo.commands.gallery.media import pixel_difference
from flowgrpo.commands.gallery.numbers import difference, number


@dataclass(frozen=True)
class Column:
    """One run's samples of a prompt and seed; no card where it has none."""

    run: Run
    card: Card | None

    @property
    def base(self) -> Shown | None:
        """The sample before training, of step 0; None where there is none, or no other."""
        samples = self.card.samples if self.card else []
        return samples[0] if len(samples) > 1 and samples[0].step == 0 else None

    @property
    def trained(self) -> list[Shown]:
        """The samples without the base."""
        samples = self.card.samples if self.card else []
        return samples[self.base is not None :]

    @property
    def final(self) -> Shown | None:
        """The last sample."""
        return self.card.samples[-1] if self.card else None

    @property
    def gain(self) -> float | None:
        """Reward of the last sample minus that of the base; None where one of them is unknown."""
        return self.card.gain if self.card and self.base else None

    def at(self, step: int) -> Shown | None:
        """The latest sample whose step is not after this one."""
        samples = self.card.samples if self.card else []
        place = bisect_right([sample.step for sample in samples], step)
        return samples[place - 1] if place else None

    def views(self, steps: Sequence[int]) -> list[Shown]:
        """The samples that some of the page's steps show."""
        found = [sample for step in steps if (sample := self.at(step))]
        return [sample for sample in (self.card.samples if self.card else []) if any(sample is each for each in found)]


@dataclass(frozen=True)
class Match:
    """The samples of one prompt and seed, a column for each run."""

    prompt: str
    seed: int | None
    columns: list[Column]

    @property
    def bases(self) -> list[tuple[list[Run], Shown]]:
        """The samples before training, each once, with the runs whose files of it have equal bytes."""
        found: dict[bytes, tuple[list[Run], Shown]] = {}
        for column in self.columns:
            if column.base is not None:
                found.setdefault(column.base.file.read_bytes(), ([], column.base))[0].append(column.run)
        return list(found.values())

    @property
    def complete(self) -> bool:
        """Whether all runs have it."""
        return all(column.card for column in self.columns)

    def largest_gain(self, units: Mapping[int, float]) -> float | None:
        """The largest change of a run's reward, up or down; None where no run knows its own.

        Args:
            units: that the rewards of a run are told in, by its index.
        """
        gains = [(column.run.index, column.gain) for column in self.columns]
        return max((abs(gain) / units[index] for index, gain in gains if gain is not None), default=None)

    @property
    def largest_pixel_difference(self) -> float | None:
        """The largest mean difference of a run's last picture from its base; None where there are no two pictures."""
        pairs = [(column.base, column.final) for column in self.columns]
        found = [pixel_difference(base.file, final.file) for base, final in pairs if base and final]
        return max((each for each in found if each is not None), default=None)

    def apart(self, step: int) -> str:
        """In words, how far the runs' total rewards are apart at a step; empty where fewer than two are known."""
        shown = [(column.run, sample.reward) for column in self.columns if (sample := column.at(step))]
        known = [(run, reward) for run, reward in shown if reward is not None]
        if len(known) == 2:
            (first, before), (second, after) = known
            return f"{second.letter} − {first.letter}: {difference(before, after)}"
        return f"spread {number(statistics.pstdev(reward for _, reward in known), 2)}" if len(known) > 2 else ""


def matches(runs: Sequence[Run]) -> list[Match]:
    """The samples of all runs by prompt and seed: those of the first run in its order, then those that only others have."""
    keys = dict.fromkeys(key for run in runs for key in run.cards)
    return [Match(key[0], key[1], [Column(run, run.cards.get(key)) for run in runs]) for key in keys]


def shown_steps(found: Sequence[Match]) -> list[int]:
    """The steps that can be chosen: those of samples after the base, of all runs; 0 where there is none after it."""
    steps = {sample.step for match in found for column in match.columns for sample in column.trained}
    return sorted(step for step in steps if step) or sorted(steps)


def disagreements(found: Sequence[Match], comparable: bool) -> list[float]:
    """How far the runs' last samples are apart: the standard deviation of their rewards, 0 where fewer than two are known.

    Args:
        comparable: whether total rewards are. Otherwise it is the mean over the rewards that all runs have, each in units of
            its standard deviation over all last samples.
    """
    finals = [[column.final for column in match.columns if column.final] for match in found]
    if comparable:
        return [_deviation([final.reward for final in each]) for each in finals]
    shared = _shared_rewards(found)
    scales = {name: _deviation([final.rewards.get(name) for each in finals for final in each]) for name in shared}
    return [
        sum(_deviation([final.rewards.get(name) for final in each]) / (scales[name] or 1.0) for name in shared)
        / max(len(shared), 1)
        for each in finals
    ]


def _shared_rewards(found: Sequence[Match]) -> list[str]:
    """The rewards that the last samples of every run have which has samples."""
    names: dict[int, set[str]] = {}
    for column in (column for match in found for column in match.columns):
        if (final := column.final) is not None:
            names.setdefault(column.run.index, set()).update(final.rewards)
    return sorted(set.intersection(*names.values())) if names else []


def changes(found: Sequence[Match], comparable: bool) -> list[float]:
    """How much a prompt's sample changed in the run where it changed most: its reward, or without any reward its pixels.

    Args:
        comparable: whether total rewards are. Otherwise those of a run are in units of the standard deviation of its gains.
    """
    by_run: dict[int, list[float | None]] = {}
    for column in (column for match in found for column in match.columns):
        by_run.setdefault(column.run.index, []).append(column.gain)
    units = {index: 1.0 if comparable else _deviation(gains) or 1.0 for index, gains in by_run.items()}
    gains = [match.largest_gain(units) for match in found]
    known = gains if any(gain is not None for gain in gains) else [match.largest_pixel_difference for match in found]
    return [change or 0.0 for change in known]


def _deviation(rewards: Sequence[float | None]) -> float:
    known = [reward for reward in rewards if reward is not None]
    return statistics.pstdev(known) if len(known) > 1 else 0.0
