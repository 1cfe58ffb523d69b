"""Comments above the rows of a table: what a row is, its source and its numbered departures from the source."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from flowgrpo.schema.imports.sources import definitions, place, source_file


@dataclass(frozen=True, kw_only=True)
class Row:
    """The comment above a row, and its place."""

    text: str  # the comment before its first departure
    departures: list[str]  # each begins with its number
    where: str  # file:line of the row


def read_rows(module: str, table: str) -> dict[str, Row]:
    """Return the rows of `table`, a dictionary that a module defines, by their keys; the module is not imported."""
    lines = source_file(module).read_text(encoding="utf-8").splitlines()
    written = definitions(module)[table].value
    assert isinstance(written, ast.Dict)
    rows = {}
    for key in written.keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            text, departures = _split(_comment_above(lines, key.lineno))
            rows[key.value] = Row(text=text, departures=departures, where=place(module, key.lineno))
    return rows


def _comment_above(lines: list[str], number: int) -> list[str]:
    """Return the lines of the comment above a line, which is counted from 1."""
    comment: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.lstrip().startswith("#"):
            break
        comment.insert(0, line.lstrip().removeprefix("#").removeprefix(" "))
    return comment


def _split(comment: list[str]) -> tuple[str, list[str]]:
    """Return the text before the numbered departures, and the departures."""
    parts: list[list[str]] = [[]]
    for line in comment:
        if re.match(r"\d+\. ", line):
            parts.append([])
        parts[-1].append(line.strip())
    text, *departures = (" ".join(part) for part in parts)
    return text, departures
