"""The frames of a video that a reward of pictures sees."""

from __future__ import annotations

import re

RULES = "first, middle, all, every N, or a number of evenly spaced frames"


def choose(rule: str | int, count: int) -> list[int]:
    """Return the indices of the frames, of `count`, that a rule chooses; raise ValueError if there is no such rule.

    `every 8` is each eighth frame from the first on. A number is of evenly spaced frames with both ends; 1 is the first.
    """
    if rule == "middle":
        return [(count - 1) // 2]
    if rule == "all":
        return list(range(count))
    if isinstance(rule, str) and (match := re.fullmatch(r"every ([1-9]\d*)", rule)):
        return list(range(0, count, int(match[1])))
    number = 1 if rule == "first" else rule
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"frames: there is no rule {rule!r}, take {RULES}")
    return sorted({round(i * (count - 1) / max(1, number - 1)) for i in range(number)})
