"""`flowgrpo methods`: list the words and presets of both wings, or describe one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="a preset, a word, a paper or an option")] = None,
    form: Format = "human",
) -> None:
    """List the presets and the words of each axis, or describe those that match a name, a paper or an option."""
    entries = catalogue.catalogue()
    if name is not None:
        asked = name.lower().replace("-", "_")
        known = dict.fromkeys(entry.name for entry in entries)
        exact = [entry for entry in entries if entry.name == asked or name in entry.source]
        named = _with_option(entries, lambda _, meaning: _names_paper(meaning, name))
        known_in = {entry.kind for entry in exact}
        exact += [entry for entry in named if entry.kind not in known_in]
        entries = exact or _with_option(entries, lambda key, _: key.rpartition(".")[2] == name)
        if not entries:
            hint = nearest(asked, known, "flowgrpo methods lists them")
            raise InputError(f"there is no preset, word or paper {name!r}, {hint}")
    if form == "json":
        print_json([asdict(entry) for entry in entries])
    elif name is not None:
        for entry in entries:
            for label, text in describe(entry):
                print_line(f"{label:{LABEL - 2}}  {text}".rstrip())
            out.print()
    else:
        _list(entries)


def _with_option(entries: Sequence[Entry], fits: Callable[[str, str], bool]) -> list[Entry]:
    """Return the first word of each axis that has an option whose key and meaning fit."""
    found = [each for each in entries if any(fits(key, option["meaning"]) for key, option in each.options.items())]
    return list({(entry.kind, entry.axis): entry for entry in reversed(found)}.values())[::-1]


def _names_paper(meaning: str, name: str) -> bool:
    """Return whether the meaning of an option names a paper so: by its arXiv number, or a word with two capitals."""
    words = (word.strip(".") for word in re.findall(r"[\w.+-]+", meaning))
    return name.lower() in (
        word.lower() for word in words if catalogue.PAPER.fullmatch(word) or sum(map(str.isupper, word)) > 1
    )


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
    say("flowgrpo methods NAME shows options, source, formula and differences from the paper")


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
        lines += [("measured", f"{gain['gain']:.3f} ± {gain['error']:.3f} {gain['of']}")]
    lines += [(axis, to_yaml(choice)) for axis, choice in entry.choices.items()]
    if entry.published:
        stated = {key: {"source": value, "run": value} for key, value in entry.published.items()}
        lines += [("published", published.line(stated, entry.not_said))]
    lines += [("", ""), *(("", line) for line in entry.text.splitlines())]
    if entry.departures:
        lines += [("", ""), ("departures", "besides those of all presets, at the top of that file")]
        lines += [("", departure) for departure in entry.departures]
    if entry.options:
        lines += [("", ""), ("options", "")]
        for name, option in entry.options.items():
            default = to_yaml(option["default"]) if "default" in option else "required"
            there = f" {option['where']}" if "where" in option else ""
            lines += [("", f"{name} ({default}): {option['meaning']}{there}")]
    return [(label, text) for label, text in lines if text or label != "source"]
