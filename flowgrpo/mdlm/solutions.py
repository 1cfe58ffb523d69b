"""Whether the training prompts have the solutions that hints are parts of."""

from __future__ import annotations

from collections.abc import Sequence

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import TextConfig


def check_hints(settings: TextConfig, train_prompts: Sequence[Prompt]) -> None:
    """Refuse hints where no training prompt has a solution, or one that is not a text.

    Raises:
        InputError: it is so.
    """
    hints = settings.algorithm.hints
    if hints.name == "none":
        return
    for solution in (p.columns.get(hints.column) for p in train_prompts):
        if not isinstance(solution, str | None):
            raise InputError(f"algorithm.hints.column: {hints.column!r} holds {solution!r}, a solution is a text")
    if not any(p.columns.get(hints.column) for p in train_prompts):
        raise InputError(
            f"algorithm.hints.column: no training prompt has {hints.column!r}, they have "
            f"{', '.join(train_prompts[0].columns) or 'no columns'}"
        )
