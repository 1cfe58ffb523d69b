"""HTML of a sampled text: the answer, and each token of its canvas coloured by the step that committed it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from markupsafe import Markup

from flowgrpo.data import tables
from flowgrpo.errors import InputError

SPACES = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}


def answer(path: Path) -> Markup:
    """Return the answer and its heat strip; raise InputError if the file is malformed.

    The file is JSON with `text`, `tokens` and `steps`: the 0-based step that committed each token, -1 if it was given.
    """
    try:
        sample = tables.document(path)
        text, tokens = sample["text"], sample["tokens"]
        strip = _strip(tokens, sample["steps"], _end_count(text, tokens))
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} is not a text as flowgrpo sample writes them, an object with the keys text, tokens and steps"
        ) from None
    return Markup('<p class="text">{}</p>{}').format(text, strip)


def _strip(tokens: Sequence[str], steps: Sequence[int], end_count: int) -> Markup:
    """Return one cell per token; the last `end_count` are small and without text."""
    count = max(steps, default=-1) + 1
    answered = len(tokens) - end_count
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
    visible = Markup().join(Markup("<u>{}</u>").format(SPACES[c]) if c in SPACES else c for c in token)
    return Markup('<i{}{} title="{}">{}</i>{}').format(kind, heat, when, visible, line)


def _end_count(text: str, tokens: Sequence[str]) -> int:
    """Count the end-of-sequence tokens at the end of the canvas; they are equal, and the answer leaves them out."""
    if not tokens or tokens[-1].strip() in text:
        return 0
    return sum(1 for _ in takewhile(tokens[-1].__eq__, reversed(tokens)))
