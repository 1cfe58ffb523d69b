"""Format numbers for pages: significant digits, signed differences, means with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def number(value: float | None, digits: int = 3) -> str:
    """Format a number to `digits` significant digits, larger ones to a whole number; None becomes an en dash."""
    if value is None:
        return "–"
    large = abs(value) >= 10**digits - 0.5
    written = f"{value:.0f}" if large else f"{value + 0.0:#.{digits}g}".removesuffix(".")
    return written.replace("-", "−")


def difference(before: float | None, after: float | None) -> str:
    """Format `after - before` with its sign; empty if one of them is None."""
    if before is None or after is None:
        return ""
    return f"+{number(after - before)}" if after > before else "±0" if after == before else number(after - before)


def minutes(seconds: float) -> str:
    """Format a time in minutes and whole seconds."""
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def compact(value: float) -> str:
    """Format a number of an axis: from 10,000 in thousands (k), millions (M) or billions (G)."""
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= power:
            return f"{value / (1e3 if letter == 'k' else power):g}{letter}"
    return f"{value:g}"


@dataclass(frozen=True)
class Mean:
    """Mean of `count` samples with its standard error; both may be unknown, and one sample has no error."""

    value: float
    error: float | None
    count: int | None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Mean:
        """Return the mean reward of a metric line, whose standard deviation is the population's (divided by n)."""
        count, deviation = line.get("reward/count"), line.get("reward/std")
        error = None
        if count is not None and count > 1 and deviation is not None:
            error = deviation / math.sqrt(count - 1)
        return cls(line["reward/mean"], error, count)


def counts(before: Mean, after: Mean) -> str:
    """Format the sample counts of two means; empty if the second is unknown."""
    if after.count is None:
        return ""
    if before.count in (None, after.count):
        return f"n = {after.count}"
    return f"n = {before.count} and {after.count}, so not of the same samples"


def share(value: float | None, low: float, high: float) -> int | None:
    """Return where a value lies between two bounds, in percent; None if it is None or the bounds are equal."""
    if value is None or high <= low:
        return None
    return round(100 * min(1.0, max(0.0, (value - low) / (high - low))))
