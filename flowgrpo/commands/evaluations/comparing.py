"""Several evaluations of one set: means of the prompts that all have, and paired differences from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo.commands.evaluations.results import Results
from flowgrpo.commands.evaluations.statistics import Statistic, Summary, difference, summarise
from flowgrpo.errors import InputError

MOST_DECIMALS = 6


@dataclass(frozen=True)
class Row:
    """A category, or the total: a statistic of each evaluation, and the others' differences from the first."""

    name: str
    statistics: list[Statistic | None]
    differences: list[Statistic | None]


@dataclass(frozen=True)
class Compared:
    """The numbers of one reward in one or more evaluations, of prompts with a score in all of them."""

    reward: str
    summaries: list[Summary]
    unscored: list[int]  # samples of each without a score

    @property
    def decimals(self) -> int:
        """Places behind the point with which all numbers are written: two digits of the total's error, or three places."""
        errors = [each.total.error for each in self.summaries if each.total and each.total.error]
        return min(MOST_DECIMALS, max(0, 1 - math.floor(math.log10(min(errors))))) if errors else 3

    def write(self, value: float, sign: str = "") -> str:
        """Write a number; `sign` is + for differences."""
        rounded = round(value, self.decimals) + 0.0  # no minus before zero
        return f"{rounded:{sign}.{self.decimals}f}".replace("-", "−")

    @property
    def rows(self) -> list[Row]:
        """The categories of all evaluations and, last, the total."""
        found = [{each.name: each for each in summary.rows} for summary in self.summaries]
        names = [each.name for summary in self.summaries for each in summary.categories]
        last = [each.name for summary in self.summaries for each in summary.rows[-1:]]
        order = list(dict.fromkeys([*names, *last]))
        return [self._row(name, [each.get(name) for each in found]) for name in order]

    @staticmethod
    def _row(name: str, statistics: list[Statistic | None]) -> Row:
        first, *others = statistics
        return Row(name, statistics, [difference(first, each) if first and each else None for each in others])


def letter(place: int) -> str:
    """Return the name of an evaluation in tables and pages: A to Z, then A1, B1, ..."""
    return chr(ord("A") + place % 26) + (str(place // 26) if place > 25 else "")


def restrict(results: Sequence[Results]) -> list[Results]:
    """Return evaluations with the samples of prompts that all have; raise InputError if there are none."""
    first = results[0]
    for each in results[1:]:
        if each.asked["set"] != first.asked["set"]:
            raise InputError(
                f"{each.folder}: is an evaluation of {each.asked['set']}, and {first.folder} of {first.asked['set']}; "
                "compare evaluations of one set"
            )
    common = set.intersection(*({(one.index, one.prompt) for one in each.samples} for each in results))
    if not common:
        raise InputError(
            f"{first.folder} and {results[-1].folder}: no prompt is in both, so that nothing can be compared"
        )
    return [
        replace(each, samples=[one for one in each.samples if (one.index, one.prompt) in common]) for each in results
    ]


def compare(results: Sequence[Results]) -> list[Compared]:
    """Return the numbers of each reward that all evaluations have; raise InputError if there is none."""
    names = [name for name in results[0].rewards if all(name in each.rewards for each in results)]
    if not names:
        raise InputError(f"{results[-1].folder}: it has none of the rewards {', '.join(results[0].rewards)}")
    return [_compare(results, name) for name in names]


def _compare(results: Sequence[Results], reward: str) -> Compared:
    known = [[one for one in each.samples if one.rewards.get(reward) is not None] for each in results]
    common = set.intersection(*({one.index for one in samples} for samples in known))
    paired = [[one for one in samples if one.index in common] for samples in known]
    total = results[0].asked["total"]
    unscored = [len(each.samples) - len(samples) for each, samples in zip(results, known, strict=True)]
    return Compared(reward, [summarise(samples, reward, total) for samples in paired], unscored)


def sentences(common: Sequence[Results], results: Sequence[Results], compared: Sequence[Compared]) -> list[str]:
    """Return what belongs below the numbers: samples without a score, prompts that are left out, the set's own note.

    `common` are `results` as `restrict` returns them.
    """
    asked = results[0].asked
    partial = asked["prompts"] < asked["listed"]
    found = [f"{asked['prompts']} of the {asked['listed']} prompts of {asked['set']} were sampled"] if partial else []
    for numbers in compared:
        for each, unscored in zip(common, numbers.unscored, strict=True):
            if unscored:
                of = f"{unscored} of {len(each.samples)} samples"
                found.append(f"{each.asked['name']}: {of} have no score by {numbers.reward} and are left out")
    for each, kept in zip(results, common, strict=True):
        if left := len({one.index for one in each.samples}) - len({one.index for one in kept.samples}):
            found.append(f"{each.asked['name']}: {left} prompts are not in all evaluations and are left out")
    if any(summary.overlaps for numbers in compared for summary in numbers.summaries):
        found.append("a prompt may be in several categories")
    return [*found, asked["note"]] if asked["note"] else found


def document(results: Sequence[Results], compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the differences of each reward from the first evaluation for JSON."""
    found = []
    for numbers in compared:
        for place, each in enumerate(results[1:]):
            rows = [row.differences[place] for row in numbers.rows]
            *categories, total = [row.document if row else None for row in rows] or [None]
            found.append(
                {
                    "reward": numbers.reward,
                    "from": str(results[0].folder),
                    "to": str(each.folder),
                    **({} if total is None else {key: total[key] for key in ("n", "mean", "error")}),
                    "categories": [row for row in categories if row is not None],
                }
            )
    return found
