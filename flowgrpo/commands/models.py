"""`flowgrpo models`: the pipeline classes that `scripts/certify_models.py` has measured."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Column, Table

from flowgrpo.commands.terminal import Format, out, print_json, print_line

FILE = Path(__file__).parents[1] / "data" / "models.json"


def models(form: Format = "human") -> None:
    """List the pipeline classes that were tried, each with its certificate (docs/reference/models.md explains it)."""
    rows = json.loads(FILE.read_text())
    if form == "json":
        print_json(rows)
        return
    table = Table(Column("class", overflow="fold"), "task", "drift", "certified", box=None, padding=(0, 2))
    refused = []
    for row in rows:
        name = row["class"] + (f" ({row['variant']})" if row["variant"] else "")
        drift = "" if row["drift"] is None else f"{row['drift']:g}"
        table.add_row(name, row["task"], drift, "yes" if row["certified"] else "no")
        if not row["certified"]:
            refused.append(f"- {name}: {row['note']}")
    out.print(table)
    out.print("\nNot certified, with the reason:\n")
    for line in refused:
        print_line(line)
