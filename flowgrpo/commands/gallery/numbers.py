"""Numbers as the page shows them: significant digits, differences with a sign, means with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, or as many as it has before the point; an en dash for None."""
    if value is None:
        return "–"
    large = abs(value) >= 10**digits - 0.5
    written = f"{value:.0f}" if large else f"{value + 0.0:#.{digits}g}".removesuffix(".")
    return written.replace("-", "−")


def difference(before: float | None, after: float | None) -> str:
    """The difference with its sign; empty where one of them is unknown."""
    if before is None or after is None:
        return ""
    return f"+{number(after - before)}" if after > before else "±0" if after == before else number(after - before)


def minutes(seconds: float) -> str:
    """A time in minutes and whole seconds."""
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def compact(value: float) -> str:
    """A number of an axis: as it is below 10,000, in thousands (k), millions (M) or billions (G) above."""
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= power:
            return f"{value / (1e3 if letter == 'k' else power):g}{letter}"
    return f"{value:g}"


@dataclass(frozen=True)
class Mean:
    """A mean of samples.

    Attributes:
        error: its standard error; None where it is unknown, or has no value because the sample is one.
        count: of samples; None where it is unknown.
    """

    value: float
    error: float | None
    count: int | None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Mean:
        """The mean reward of a metric line; its standard deviation is that of the samples themselves, divided by n."""
        count, deviation = line.get("reward/count"), line.get("reward/std")
        error = None
        if count is not None and count > 1 and deviation is not None:
            error = deviation / math.sqrt(count - 1)
        return cls(line["reward/mean"], error, count)


def counts(before: Mean, after: Mean) -> str:
    """How many samples two means are of; empty where that is unknown."""
    if after.count is None:
        return ""
    if before.count in (None, after.count):
        return f"n = {after.count}"
    return f"n = {before.count} and {after.count}, so not of the same samples"


def share(value: float | None, low: float, high: float) -> int | None:
    """How far a value is between two bounds, in percent; None where that says nothing."""
    if value is None or high <= low:
        return None
    return round(100 * min(1.0, max(0.0, (value - low) / (high - low))))
