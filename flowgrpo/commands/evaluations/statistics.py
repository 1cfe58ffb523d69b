"""Means by category with standard errors over prompts, and paired differences of two evaluations.

Samples of one prompt are averaged first. A prompt may have several marks in a category (its questions) or in several
categories, so a category's mean is the ratio of two sums over prompts, and its error that of a ratio (Cochran, Sampling
Techniques, 3rd ed., section 6.4); with one mark for each prompt it is the usual standard error. Each prompt's share of the
error is kept, so that the error of a difference, and of a mean of means, counts a prompt once.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.commands.evaluations.results import Scored

TOTAL = "total"


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A mean over `n` prompts with its standard error, None for a single prompt.

    The error is the root of the sum of squares of `shares`, by prompt.
    """

    name: str
    n: int
    mean: float
    error: float | None
    shares: Mapping[int, float] = field(repr=False)

    @property
    def document(self) -> dict[str, Any]:
        """Return the statistic for JSON."""
        return {"name": self.name, "n": self.n, "mean": self.mean, "error": self.error}


@dataclass(frozen=True)
class Summary:
    """Statistics of one reward: of all prompts, and of each category; `unscored` counts samples without a score."""

    total: Statistic | None
    categories: list[Statistic]
    unscored: int

    @property
    def rows(self) -> list[Statistic]:
        """The categories and, last, the total, if anything was scored."""
        return [*self.categories, *([self.total] if self.total else [])]

    @property
    def overlaps(self) -> bool:
        """Whether a prompt is in several categories, apart from those above its own."""
        names = [each.name for each in self.categories]
        tops = [index for each in self.categories if parent(each.name, names) is None for index in each.shares]
        return len(set(tops)) < len(tops)


def summarise(samples: Sequence[Scored], reward: str, total: str) -> Summary:
    """Return the statistics of a reward; `total` is `prompts` or `categories`, as in `EvaluationSet`."""
    known = [(sample, value) for sample in samples if (value := sample.rewards.get(reward)) is not None]
    marks: defaultdict[str, list[tuple[int, list[float]]]] = defaultdict(list)
    for sample, _ in known:
        by_category: defaultdict[str, list[float]] = defaultdict(list)
        for name, mark in sample.marks(reward):
            by_category[name].append(mark)
        for name, values in by_category.items():
            marks[name].append((sample.index, values))
    categories = [ratio(name, marks[name]) for name in in_order(marks)]
    if not known:
        return Summary(None, [], len(samples))
    if total == "categories" and categories:
        whole = mean_of(TOTAL, [each for each in categories if parent(each.name, marks) is None])
    else:
        whole = ratio(TOTAL, [(sample.index, [value]) for sample, value in known])
    return Summary(whole, categories, len(samples) - len(known))


def ratio(name: str, marks: Iterable[tuple[int, Sequence[float]]]) -> Statistic:
    """Return the mean over the marks of prompts; each entry has a prompt's index and the marks of one of its samples."""
    by_prompt: defaultdict[int, list[Sequence[float]]] = defaultdict(list)
    for index, values in marks:
        by_prompt[index].append(values)
    sums = {index: statistics.fmean(map(math.fsum, each)) for index, each in by_prompt.items()}
    counts = {index: statistics.fmean(map(len, each)) for index, each in by_prompt.items()}
    number, count = len(sums), math.fsum(counts.values())
    mean = math.fsum(sums.values()) / count
    if number < 2:
        return Statistic(name=name, n=number, mean=mean, error=None, shares=dict.fromkeys(sums, 0.0))
    factor = math.sqrt(number / (number - 1)) / count
    return _with_error(name, mean, {index: factor * (sums[index] - mean * counts[index]) for index in sums})


def mean_of(name: str, parts: Sequence[Statistic]) -> Statistic:
    """Return the mean of several means; without an error if one of them has none."""
    mean = statistics.fmean(part.mean for part in parts)
    prompts = {index for part in parts for index in part.shares}
    if any(part.error is None for part in parts):
        return Statistic(name=name, n=len(prompts), mean=mean, error=None, shares=dict.fromkeys(prompts, 0.0))
    shares = {index: math.fsum(part.shares.get(index, 0.0) for part in parts) / len(parts) for index in prompts}
    return _with_error(name, mean, shares)


def difference(first: Statistic, second: Statistic) -> Statistic:
    """Return the second mean minus the first, of the same prompts, with the error of the paired difference."""
    mean = second.mean - first.mean
    if first.error is None or second.error is None:
        return Statistic(name=first.name, n=first.n, mean=mean, error=None, shares={})
    prompts = {*first.shares, *second.shares}
    shares = {index: second.shares.get(index, 0.0) - first.shares.get(index, 0.0) for index in prompts}
    return _with_error(first.name, mean, shares)


def _with_error(name: str, mean: float, shares: Mapping[int, float]) -> Statistic:
    error = math.sqrt(math.fsum(share * share for share in shares.values()))
    return Statistic(name=name, n=len(shares), mean=mean, error=error, shares=shares)


def parent(name: str, names: Iterable[str]) -> str | None:
    """Return the category above one: Attribute for Attribute - Color, if it is there."""
    above = name.partition("-")[0].strip()
    return above if above != name and above in names else None


def in_order(names: Iterable[str]) -> list[str]:
    """Return categories in the order in which they come, each with those below it behind it."""
    names = list(names)
    return [each for top in names if parent(top, names) is None for each in (top, *_below(top, names))]


def _below(top: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if parent(name, names) == top]
