"""Micro-batches of a sequence."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar


class Sliced(Protocol):
    """A sequence with slices of its own type."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Self: ...


S = TypeVar("S", bound=Sliced)


def batched(rows: S, size: int) -> list[S]:
    """Return consecutive slices of `size` rows; the last may be smaller. Return [] for no rows."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
