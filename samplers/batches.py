"""The loop over micro-batches: a sequence in consecutive parts."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar


class Sliced(Protocol):
    """A sequence whose parts are of its own type."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Self: ...


S = TypeVar("S", bound=Sliced)


def batched(rows: S, size: int) -> list[S]:
    """Consecutive parts of `size` rows, of the type of the whole; the last may have fewer, and no rows have no parts."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
