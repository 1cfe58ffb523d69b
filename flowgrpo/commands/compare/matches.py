"""Samples of the same prompt and seed in several runs: their disagreement, and how much training changed them."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowgrpo.commands.compare.runs import Run
from flowgrpo.commands.page_parts.cards import Card, Shown
from flowgrpo.commands.page_parts.media import pixel_difference
from flowgrpo.commands.page_parts.numbers import difference, number


@dataclass(frozen=True)
class Column:
    """One run's samples of one prompt and seed; `card` is None if the run has no such sample."""

    run: Run
    card: Card | None

    @property
    def samples(self) -> list[Shown]:
        """The samples by step."""
        return self.card.samples if self.card else []

    @property
    def base(self) -> Shown | None:
        """The sample of step 0, if there are later ones."""
        return self.samples[0] if len(self.samples) > 1 and self.samples[0].step == 0 else None

    @property
    def trained(self) -> list[Shown]:
        """The samples other than `base`."""
        return self.samples[self.base is not None :]

    @property
    def final(self) -> Shown | None:
        """The last sample."""
        return self.samples[-1] if self.samples else None

    @property
    def gain(self) -> float | None:
        """Reward of the last sample minus that of the base; None if one is unknown."""
        return self.card.gain if self.card and self.base else None

    def at(self, step: int) -> Shown | None:
        """Return the latest sample up to a step."""
        place = bisect_right([sample.step for sample in self.samples], step)
        return self.samples[place - 1] if place else None

    def views(self, steps: Sequence[int]) -> list[Shown]:
        """Return the samples that are shown at any of the page's `steps`."""
        seen = {id(self.at(step)) for step in steps}
        return [sample for sample in self.samples if id(sample) in seen]


@dataclass(frozen=True)
class Match:
    """Samples of one prompt and seed, with a column for each run."""

    prompt: str
    seed: int | None
    columns: list[Column]

    def bases(self, *, redefined: bool = False) -> list[tuple[list[Run], Shown]]:
        """Return distinct samples before training (by their bytes), with the rewards of all runs that have them.

        If a reward is `redefined` in some run, each run has its own.
        """
        distinct: dict[tuple[bytes, int | None], tuple[list[Run], Shown]] = {}
        for column in self.columns:
            if (base := column.base) is not None:
                key = base.file.read_bytes(), column.run.index if redefined else None
                having, shown = distinct.get(key, ([], base))
                distinct[key] = [*having, column.run], replace(shown, rewards=base.rewards | shown.rewards)
        return list(distinct.values())

    @property
    def complete(self) -> bool:
        """Whether all runs have samples."""
        return all(column.card for column in self.columns)

    def largest_gain(self, units: Mapping[int, float]) -> float | None:
        """Return the largest absolute gain over the runs, each divided by its run's `units`; None if no gain is known."""
        gains = [(column.run.index, column.gain) for column in self.columns]
        return max((abs(gain) / units[index] for index, gain in gains if gain is not None), default=None)

    @property
    def largest_pixel_difference(self) -> float | None:
        """Largest mean difference of a run's last picture from its base; None without two pictures."""
        pairs = [(column.base, column.final) for column in self.columns]
        changes = [pixel_difference(base.file, final.file) for base, final in pairs if base and final]
        return max((change for change in changes if change is not None), default=None)

    def apart(self, step: int) -> str:
        """Describe how far the runs' totals are apart at a step; empty if fewer than two are known."""
        shown = [(column.run, sample.reward) for column in self.columns if (sample := column.at(step))]
        known = [(run, reward) for run, reward in shown if reward is not None]
        if len(known) == 2:
            (first, before), (second, after) = known
            return f"{second.letter} − {first.letter}: {difference(before, after)}"
        return f"spread {number(statistics.pstdev(reward for _, reward in known), 2)}" if len(known) > 2 else ""


def matches(runs: Sequence[Run]) -> list[Match]:
    """Match the samples of all runs by prompt and seed, in the order of the first run that has them."""
    keys = dict.fromkeys(key for run in runs for key in run.cards)
    return [Match(key[0], key[1], [Column(run, run.cards.get(key)) for run in runs]) for key in keys]


def shown_steps(rows: Sequence[Match]) -> list[int]:
    """Return the sorted training steps of all runs' samples, without step 0; [0] if all samples are of step 0."""
    steps = {sample.step for match in rows for column in match.columns for sample in column.trained}
    return sorted(step for step in steps if step) or sorted(steps)


def disagreements(rows: Sequence[Match], comparable: bool) -> list[float]:
    """Return the standard deviation, over the runs, of the total of each match's last sample; 0 if fewer than two are known.

    If the runs' totals are not comparable, take this deviation for each reward that all runs have, divide it by that
    reward's standard deviation over all last samples, and return the mean over these rewards.
    """
    finals = [[column.final for column in match.columns if column.final] for match in rows]
    if comparable:
        return [_deviation([final.reward for final in each]) for each in finals]
    shared = _shared_rewards(rows)
    scales = {name: _deviation([final.rewards.get(name) for each in finals for final in each]) for name in shared}
    return [
        sum(_deviation([final.rewards.get(name) for final in each]) / (scales[name] or 1.0) for name in shared)
        / max(len(shared), 1)
        for each in finals
    ]


def _shared_rewards(rows: Sequence[Match]) -> list[str]:
    """Return the rewards that occur in the last samples of every run; runs without samples are ignored."""
    names: dict[int, set[str]] = {}
    for column in (column for match in rows for column in match.columns):
        if (final := column.final) is not None:
            names.setdefault(column.run.index, set()).update(final.rewards)
    return sorted(set.intersection(*names.values())) if names else []


def changes(rows: Sequence[Match], comparable: bool) -> list[float]:
    """Return for each match the largest change over the runs: of the total, or of the pixels if no gain is known at all.

    If totals are not comparable, each run's gains are divided by their standard deviation over its matches.
    """
    by_run: dict[int, list[float | None]] = {}
    for column in (column for match in rows for column in match.columns):
        by_run.setdefault(column.run.index, []).append(column.gain)
    units = {index: 1.0 if comparable else _deviation(gains) or 1.0 for index, gains in by_run.items()}
    gains = [match.largest_gain(units) for match in rows]
    known = gains if any(gain is not None for gain in gains) else [match.largest_pixel_difference for match in rows]
    return [change or 0.0 for change in known]


def _deviation(rewards: Sequence[float | None]) -> float:
    known = [reward for reward in rewards if reward is not None]
    return statistics.pstdev(known) if len(known) > 1 else 0.0
