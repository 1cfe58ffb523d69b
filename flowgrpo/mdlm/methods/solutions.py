"""The check of known solutions that an objective learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo.errors import InputError


def check_every_solution(column: str | None, columns: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError unless every training prompt has a solution; `columns` has a map per prompt.

    `column` is that of the solutions; None if the objective needs none.
    """
    if column is None:
        return
    for number, row in enumerate(columns, start=1):
        if not isinstance(row.get(column), str):
            others = ", ".join(row) or "no columns"
            raise InputError(
                f"algorithm.objective.column: training prompt {number} has no text in {column!r}, it has {others}"
            )
