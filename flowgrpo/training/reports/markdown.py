"""Anybody's text in Markdown: in tables, lines and code it is shown as it was written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowgrpo.schema.readable import readable

PLAIN = set(" .,;?!'\"()=+-/%")  # punctuation that means nothing inside a line of Markdown


def table_row(words: Sequence[str]) -> str:
    """A row of a table, of cells in Markdown."""
    return f"| {' | '.join(words)} |"


def escaped(words: str) -> str:
    """Return a text as one line of Markdown in which nothing is markup, also in a table's cell."""
    lines = re.split("\r\n|\r|\n", words)
    return "<br>".join("".join(_shown(character) for character in readable(line)) for line in lines)


def _shown(character: str) -> str:
    plain = character.isalnum() or character in PLAIN or ord(character) > 0x7F
    return character if plain else f"&#{ord(character)};"


def span(words: str) -> str:
    """A text of one line as inline code."""
    ticks, space = _ticks(words, 1), " " * ("`" in words)
    return f"{ticks}{space}{words}{space}{ticks}"


def fenced(language: str, code: str) -> str:
    """A block of code that nothing in it can close."""
    ticks = _ticks(code, 3)
    return f"{ticks}{language}\n{code}\n{ticks}"


def _ticks(words: str, least: int) -> str:
    """Return `least` backticks, or more: one more than stand together anywhere in a text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", words))])
