"""Micro-batches of a sequence."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar


class Sliced(Protocol):
    """A sequence with slices of its own type."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Self: ...


S = TypeVar("S", bound=Sliced)


def batched(rows: S, size: int) -> list[S]:
    """Return consecutive parts of `size` rows, of the type of the whole; the last may be smaller, and no rows give []."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
