"""What the page shows of a text: the answer, and under it each token of its canvas by the step that committed it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from markupsafe import Markup

from flowgrpo.data import tables
from flowgrpo.errors import InputError

SPACES = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}


def answer(path: Path) -> Markup:
    """The HTML of a text: the answer and its heat strip.

    Args:
        path: a .json file of `text`, `tokens` and `steps`; see `strip`.

    Raises:
        InputError: the file is not of this form.
    """
    try:
        sample = tables.document(path)
        text, tokens = sample["text"], sample["tokens"]
        cells = strip(tokens, sample["steps"], _ends(text, tokens))
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} is not a text as flowgrpo sample writes them, an object with the keys text, tokens and steps"
        ) from None
    return Markup('<p class="text">{}</p>{}').format(text, cells)


def strip(tokens: Sequence[str], steps: Sequence[int], ends: int) -> Markup:
    """The heat strip of a canvas: one cell per token.

    Args:
        tokens: their texts.
        steps: that committed them, 0-based; -1: given from the start.
        ends: how many tokens, the last ones, are drawn small and without text.
    """
    count = max(steps, default=-1) + 1
    answered = len(tokens) - ends
    cells = [_cell(*cell, count, index >= answered) for index, cell in enumerate(zip(tokens, steps, strict=True))]
    label = f"order of decoding: {len(tokens)} tokens in {count} steps"
    return Markup('<div class="strip" role="img" aria-label="{}">{}</div>').format(label, Markup().join(cells))


def _cell(token: str, step: int, count: int, end: bool) -> Markup:
    when = "given" if step < 0 else f"step {step + 1} of {count}"
    names = [name for name, holds in (("given", step < 0), ("end", end)) if holds]
    kind = Markup(' class="{}"').format(" ".join(names)) if names else ""
    heat = Markup(' style="--t:{}%"').format(round(100 * step / max(count - 1, 1))) if step >= 0 else ""
    if end:
        return Markup('<i{}{} title="{}, {}"></i>').format(kind, heat, token, when)
    line = Markup("<br>") if "\n" in token else ""
    return Markup('<i{}{} title="{}">{}</i>{}').format(kind, heat, when, _visible(token), line)


def _ends(text: str, tokens: Sequence[str]) -> int:
    """How many tokens are the end of sequence: equal ones, the last of the canvas, that the answer does not hold."""
    if not tokens or tokens[-1].strip() in text:
        return 0
    return sum(1 for _ in takewhile(tokens[-1].__eq__, reversed(tokens)))


def _visible(token: str) -> Markup:
    """A token whose white space can be seen."""
    return Markup().join(Markup("<u>{}</u>").format(SPACES[c]) if c in SPACES else c for c in token)
