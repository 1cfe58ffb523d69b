"""The pipeline classes that were tried, as `scripts/certify_models.py` measured them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from flowgrpo.commands.terminal import out

FILE = Path(__file__).parents[1] / "data" / "models.json"


def listed() -> list[dict[str, Any]]:
    """One row for each class, and each variant of one: its task, drift, whether it is certified, and if not, why."""
    return json.loads(FILE.read_text())


def show() -> None:
    """Print a table of all classes, and below it why some are not certified."""
    table = Table(Column("class", overflow="fold"), "task", "drift", "certified", box=None, padding=(0, 2))
    refused = []
    for row in listed():
        name = row["class"] + (f" ({row['variant']})" if row["variant"] else "")
        drift = "" if row["drift"] is None else f"{row['drift']:g}"
        table.add_row(name, row["task"], drift, "yes" if row["certified"] else "no")
        refused += [] if row["certified"] else [f"{name}: {row['note']}"]
    out.print(table)
    out.print("\nNot certified, because of what was measured:\n")
    for line in refused:
        out.print(f"- {line}", soft_wrap=True)
