"""Detection of reward hacking: a reward that is only watched falls while the trained one rises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def find_overoptimized(lines: Sequence[Mapping[str, Any]], watched: Sequence[str], times: int) -> list[str]:
    """Return a warning for each `watched` reward that fell in the last `times` evaluations while the trained one rose."""
    lines = [line for line in lines if line["phase"] == "eval"]
    trained = [line["reward/mean"] for line in lines]
    sentences = []
    for name in watched:
        streak = overoptimization_streak(trained, [line.get(f"reward/{name}/mean") for line in lines])
        if streak >= times:
            sentences.append(
                f"step {lines[-1]['step']}: the reward rose and {name!r}, which is only watched, fell {streak} "
                "evaluations in a row; look at the samples, the reward may be exploited"
            )
    return sentences


def overoptimization_streak(trained: Sequence[float | None], watched: Sequence[float | None]) -> int:
    """Return the number of latest consecutive evaluations in which the trained reward rose and the watched one fell.

    A missing reward (None) ends the streak.
    """
    count = 0
    for (a, b), (c, d) in pairwise(zip(trained, watched, strict=True)):
        rose = a is not None and c is not None and c > a
        fell = b is not None and d is not None and d < b
        count = count + 1 if rose and fell else 0
    return count
