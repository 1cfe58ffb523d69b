"""`flowgrpo models`: the pipeline classes that `scripts/certify_models.py` has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from flowgrpo.commands.terminal import out, print_line

FILE = Path(__file__).parents[1] / "data" / "models.json"


def read_models() -> list[dict[str, Any]]:
    """Return a row for each class, and for each variant of one: task, drift, whether it is certified, and a note."""
    return json.loads(FILE.read_text())


def show() -> None:
    """Print a table of all classes, then why some are not certified."""
    table = Table(Column("class", overflow="fold"), "task", "drift", "certified", box=None, padding=(0, 2))
    refused = []
    for row in read_models():
        name = row["class"] + (f" ({row['variant']})" if row["variant"] else "")
        drift = "" if row["drift"] is None else f"{row['drift']:g}"
        table.add_row(name, row["task"], drift, "yes" if row["certified"] else "no")
        if not row["certified"]:
            refused.append(f"- {name}: {row['note']}")
    out.print(table)
    out.print("\nNot certified, because of what was measured:\n")
    for line in refused:
        print_line(line)
