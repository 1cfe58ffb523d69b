"""Markdown from arbitrary text, escaped for tables, lines and code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowgrpo.schema.readable import readable

PLAIN = set(" .,;?!'\"()=+-/%")  # punctuation without a meaning in Markdown


def table_row(words: Sequence[str]) -> str:
    """Return a Markdown table row of cells that are Markdown already."""
    return f"| {' | '.join(words)} |"


def escape(words: str) -> str:
    """Return a text as one line of Markdown that shows it literally, in table cells too."""
    lines = re.split("\r\n|\r|\n", words)
    return "<br>".join("".join(_escape_character(character) for character in readable(line)) for line in lines)


def _escape_character(character: str) -> str:
    plain = character.isalnum() or character in PLAIN or ord(character) > 0x7F
    return character if plain else f"&#{ord(character)};"


def span(words: str) -> str:
    """Return one line of text as inline code."""
    ticks, space = _ticks(words, 1), " " * ("`" in words)
    return f"{ticks}{space}{words}{space}{ticks}"


def fence(language: str, code: str) -> str:
    """Return a Markdown code block, with enough backticks that the code cannot end it."""
    ticks = _ticks(code, 3)
    return f"{ticks}{language}\n{code}\n{ticks}"


def _ticks(words: str, least: int) -> str:
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", words))])
