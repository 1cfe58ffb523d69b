"""Escape arbitrary text for Markdown tables, lines and code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowgrpo.schema.readable import readable

PLAIN = set(" .,;?!'\"()=+-/%")  # punctuation without a meaning in Markdown


def table_row(words: Sequence[str]) -> str:
    """Return a table row of Markdown cells."""
    return f"| {' | '.join(words)} |"


def escaped(words: str) -> str:
    """Return a text as one line of Markdown without markup, also for table cells."""
    lines = re.split("\r\n|\r|\n", words)
    return "<br>".join("".join(_shown(character) for character in readable(line)) for line in lines)


def _shown(character: str) -> str:
    plain = character.isalnum() or character in PLAIN or ord(character) > 0x7F
    return character if plain else f"&#{ord(character)};"


def span(words: str) -> str:
    """Return one line as inline code."""
    ticks, space = _ticks(words, 1), " " * ("`" in words)
    return f"{ticks}{space}{words}{space}{ticks}"


def fenced(language: str, code: str) -> str:
    """Return a code block that its content cannot close."""
    ticks = _ticks(code, 3)
    return f"{ticks}{language}\n{code}\n{ticks}"


def _ticks(words: str, least: int) -> str:
    """Return at least `least` backticks, and more than any run of them in the text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", words))])
