"""The loop over micro-batches: a sequence in consecutive parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

S = TypeVar("S", bound=Sequence)


def batched(rows: S, size: int) -> list[S]:
    """Consecutive parts of `size` rows, of the type of the whole; the last may have fewer, and no rows have no parts."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
