"""Rows of all processes, for rules that compare all tokens of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowgrpo.schema.imports.heavy import Tensor, torch

Gather = Callable[[list[Any]], list[Any]]


def gather_rows(rows: Mapping[str, Tensor], gather: Gather, rank: int) -> tuple[dict[str, Tensor], slice]:
    """Return the rows of all processes, in the order of ranks and in the host's memory, and the slice of the own ones.

    A collective call. `rows` are tensors (B, ...) without gradient, whose number B may differ between processes. `gather`
    concatenates the lists of all processes, `rank` is the number of this one.
    """
    parts: list[tuple[int, dict[str, Tensor]]] = gather([(rank, {name: x.detach().cpu() for name, x in rows.items()})])
    lengths = {number: len(next(iter(part.values()))) for number, part in parts}
    before = sum(length for number, length in lengths.items() if number < rank)
    every = {name: torch.cat([part[name] for _, part in sorted(parts, key=lambda each: each[0])]) for name in rows}
    return every, slice(before, before + lengths[rank])
