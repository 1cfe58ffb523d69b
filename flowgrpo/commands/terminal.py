"""What commands print, and in which form: others' words, too, so nothing in them is markup or steers the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup
from typing_extensions import override

from flowgrpo.schema.readable import one_line, readable

Format = Annotated[Literal["human", "json"], typer.Option("--format", help="json prints one document on stdout")]


class Commands(TyperGroup):
    """Commands of which a Ctrl-C is heard outside, where typer would say nothing."""

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


class _Readable(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(readable(text), **options)


out = _Readable(highlight=False, markup=False, emoji=False)


def table_lines(rows: Sequence[Mapping[str, str | float]]) -> list[str]:
    """Rows of the same keys as lines of equal columns, below their keys; none without rows."""
    if not rows:
        return []
    cells = [list(rows[0]), *([v if isinstance(v, str) else f"{v:.3f}" for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def say(sentence: str) -> None:
    """Print one line on stderr, whatever is in the sentence."""
    print(one_line(sentence), file=sys.stderr)
