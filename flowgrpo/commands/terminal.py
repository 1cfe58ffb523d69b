"""Terminal output of the commands. Markup and control sequences in printed texts, such as prompts, have no effect."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup
from typing_extensions import override

from flowgrpo.schema.readable import one_line, readable

Format = Annotated[
    Literal["human", "json"], typer.Option("--format", help="text for people, or one JSON document on stdout")
]


GROUPS = {  # of commands in the help
    "Begin here": ("init", "doctor", "train", "gallery"),
    "Train": ("plan", "mdlm"),
    "Look": ("explain", "report", "watch", "sample"),
    "Measure": ("evaluate", "score", "vote"),
    "Share": ("export", "serve"),
    "Look up": ("rewards", "methods", "models"),
}


class Commands(TyperGroup):
    """Command group with `GROUPS` in its help, which raises `typer.Abort` on Ctrl-C; typer itself would swallow it."""

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        named = {name for names in GROUPS.values() for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in named)
        for title, names in {**GROUPS, "Commands": others}.items():
            commands = ((name, self.get_command(ctx, name)) for name in names)
            rows = [(name, command.get_short_help_str(limit=200)) for name, command in commands if command is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def lists(self) -> dict[str, str]:
        """Return a Markdown list of the commands of each group, for docs/reference/cli.md."""
        return {
            title: "".join(item for name in names for item in _items(name, self.commands[name]))
            for title, names in GROUPS.items()
        }

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


def _items(name: str, command: Any) -> list[str]:
    """Return the item of a command, or of each command of a group: its name with its arguments, and what it does."""
    if below := getattr(command, "commands", None):
        return [item for inner in below.values() for item in _items(f"{name} {inner.name}", inner)]
    taken = [each.metavar or each.name.upper() for each in command.params if each.param_type_name == "argument"]
    return [f"- `{' '.join((name, *taken))}`: {command.help}\n"]


class _Readable(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(readable(text), **options)


out = _Readable(highlight=False, markup=False, emoji=False)


def print_line(line: str) -> None:
    """Print a line on stdout without wrapping it."""
    out.print(line, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print a JSON document on stdout."""
    print(json.dumps(document, indent=1))


def say(sentence: str) -> None:
    """Print a sentence on stderr, as one line."""
    print(one_line(sentence), file=sys.stderr)


def table_lines(rows: Sequence[Mapping[str, str | float]]) -> list[str]:
    """Return a header line and a line for each row, in aligned columns; no lines without rows."""
    if not rows:
        return []
    cells = [list(rows[0]), *([v if isinstance(v, str) else f"{v:.3f}" for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
