"""`flowgrpo methods`: list the words and presets of both wings, or describe one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flowgrpo.commands.runs.explain import to_yaml
from flowgrpo.commands.terminal import Format, out, print_json, print_line, say
from flowgrpo.errors import InputError
from flowgrpo.schema import published
from flowgrpo.schema.imports.lazy import lazy
from rewards.base import nearest

if TYPE_CHECKING:
    from flowgrpo.commands.methods import catalogue
    from flowgrpo.commands.methods.catalogue import Entry
else:  # it imports the schemas of both wings
    catalogue = lazy("flowgrpo.commands.methods.catalogue")

LABEL = 12  # width of the labels in a description


def methods(name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None, form: Format = "human") -> None:
    """List the presets and the words of each axis, or describe those of a name or an arXiv number."""
    entries = catalogue.catalogue()
    if name is not None:
        asked = name.lower().replace("-", "_")
        known = dict.fromkeys(entry.name for entry in entries)
        entries = [entry for entry in entries if entry.name == asked or name in entry.source]
        if not entries:
            raise InputError(f"there is no preset, word or paper {name!r}, {nearest(asked, known)}")
    if form == "json":
        print_json([asdict(entry) for entry in entries])
    elif name is not None:
        for entry in entries:
            for label, text in describe(entry):
                print_line(f"{label:{LABEL - 2}}  {text}".rstrip())
            out.print()
    else:
        _list(entries)


def _list(entries: Sequence[Entry]) -> None:
    for wing in catalogue.WINGS:
        print_line(f"{wing.title}: presets, with model evaluations of one iteration")
        table = Table("preset", "rollout", "update", "what it is", box=None, padding=(0, 2))
        for entry in entries:
            if entry.kind == wing.kind and entry.cost is not None:
                cost = entry.cost
                table.add_row(entry.name, f"{cost['rollout']:,}", f"{cost['update']:,}", entry.summary)
        out.print(table)
        print_line(f"\n{wing.title}: words of each axis")
        table = Table("axis", "word", "what it is", box=None, padding=(0, 2))
        for entry in entries:
            if entry.kind == wing.kind and entry.cost is None:
                table.add_row(entry.axis, entry.name, entry.summary)
        out.print(table)
        out.print()
    say("flowgrpo methods NAME tells of options, source, formula and departures")


def describe(entry: Entry) -> list[tuple[str, str]]:
    """Return an entry as pairs of a label and a text."""
    (wing,) = (wing for wing in catalogue.WINGS if wing.kind == entry.kind)
    of = "a preset" if entry.cost is not None else f"{entry.axis}: {wing.questions[entry.axis]}"
    lines = [(entry.name, f"{of} ({wing.title})"), ("source", ", ".join(f"arXiv {paper}" for paper in entry.source))]
    lines += [("formula" if entry.cost is None else "row", entry.where)]
    if entry.cost is not None:
        counts = ", ".join(f"{key.replace('_', ' ')} {count:,}" for key, count in entry.cost.items())
        lines += [("cost", f"{counts}, of one iteration")]
    if entry.measured is not None:
        gain = entry.measured
        lines += [("measured", f"{gain['gain']} ± {gain['error']}, {gain['of']}")]
    lines += [(axis, to_yaml(choice)) for axis, choice in entry.choices.items()]
    if entry.published:
        stated = {key: {"source": value, "run": value} for key, value in entry.published.items()}
        lines += [("published", published.line(stated, entry.not_said))]
    lines += [("", ""), *(("", line) for line in entry.text.splitlines())]
    if entry.departures:
        lines += [("", ""), ("departures", "beside those that all rows share, at the top of that file")]
        lines += [("", departure) for departure in entry.departures]
    if entry.options:
        lines += [("", ""), ("options", "")]
        lines += [
            ("", f"{name} ({to_yaml(option['default']) if 'default' in option else 'required'}): {option['meaning']}")
            for name, option in entry.options.items()
        ]
    return [(label, text) for label, text in lines if text or label != "source"]
