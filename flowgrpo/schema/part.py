"""A part of the schedule: the fractions of its steps between which something is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowgrpo.errors import InputError

FORM = "write first:end, fractions of the steps from the start, such as 0:0.6"


def read_part(written: Any, key: str = "eval.adapter_steps") -> Any:
    """Return first and end of a part; None stays.

    Args:
        written: the text `first:end`, or a list of both.

    Raises:
        InputError: it is something else, or not 0 <= first <= end <= 1.
    """
    if written is None:
        return None
    ends = written.split(":") if isinstance(written, str) else written
    if not isinstance(ends, list) or len(ends) != 2 or any(isinstance(end, bool) for end in ends):
        raise InputError(f"{key}: {written!r} is no part of the schedule, {FORM}")
    try:
        first, end = map(float, ends)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{key}: {written!r} is no part of the schedule, {FORM}") from None
    if not 0 <= first <= end <= 1:
        raise InputError(f"{key}: {written!r} does not lie between 0 and 1 in this order, {FORM}")
    return [first, end]


def part_text(part: Sequence[float]) -> str:
    """A part as it is written: 0:0.6."""
    return ":".join(repr(float(end)).removesuffix(".0") for end in part)
