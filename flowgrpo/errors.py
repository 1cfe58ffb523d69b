"""The error of wrong input: one sentence that names the place and the nearest valid choice; exit status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What a user wrote is wrong. The message is one clear sentence."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """The end of such a sentence: "did you mean 'x'?" if one of `choices` is close to `word`, otherwise all of them."""
    choices = [str(choice) for choice in choices]
    close = difflib.get_close_matches(word, choices, 1, 0.6)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(choices)}"
