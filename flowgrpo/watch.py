"""Hack watch: do the rewards that are trained on part from those that are only watched?

A policy that exploits a reward raises it while people like its samples less. Held-out rewards that nobody trains on
(`eval_rewards`) show it early, if anything does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def parted(trained: Sequence[float | None], watched: Sequence[float | None]) -> int:
    """Over how many evaluations in a row, up to the last, the trained reward rose while the watched one fell.

    Args:
        trained, watched: held-out means at each evaluation; None where unknown, which ends a row.
    """
    count = 0
    for (a, b), (c, d) in pairwise(zip(trained, watched, strict=True)):
        known = None not in (a, b, c, d)
        count = count + 1 if known and c > a and d < b else 0
    return count
