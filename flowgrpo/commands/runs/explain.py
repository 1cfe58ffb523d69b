"""Explain config keys: one (`flowgrpo plan CONFIG --explain KEY`), or all with their defaults on a page."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import PydanticUndefined, to_jsonable_python

from flowgrpo.schema import explain
from flowgrpo.schema.base import Choice, Strict

COLUMN = 34  # of the comments on the page
WIDTH = 120


def explain_key(settings: Strict, key: str) -> list[tuple[str, str]]:
    """Return what a key means, takes and is, as pairs of a label and a text; raise InputError if it is unknown.

    A section has the keys below it, another key the lines of code that use it.
    """
    entry = explain.explain(settings, key)
    lines = [(key, entry.meaning), ("takes", entry.takes)]
    if entry.default is not PydanticUndefined:
        lines.append(("default", to_yaml(entry.default)))
    lines.append(("here", to_yaml(entry.value)))
    if entry.below:
        return lines + [(f"{key}.{name}", meaning) for name, meaning in entry.below.items()]
    other = "flowgrpo/mdlm/" if getattr(settings, "kind", None) == "flow" else "flowgrpo/flow/"
    return [*lines, *(("used in", place) for place in find_uses(key, entry.home) if not place.startswith(other))]


def find_uses(key: str, home: str = "") -> list[str]:
    """Return the files and lines that read a key: as an attribute of its section, or of `self` in the module `home`."""
    root = Path(__file__).parents[2]
    *section, name = key.split(".")[-2:]
    places = []
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if name not in text:
            continue
        place = str(file.relative_to(root.parent))
        owners = [*(section or ["config", "settings"]), *["self"] * (place == home.replace(".", "/") + ".py")]
        lines = sorted(
            node.lineno
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute) and node.attr == name and _last_name(node.value) in owners
        )
        if lines:
            places.append(f"{place}:{', '.join(map(str, dict.fromkeys(lines)))}")
    return places


def _last_name(node: ast.expr) -> str | None:
    """Return the name that an expression ends with: c for c and for a.b.c."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def to_yaml(value: Any) -> str:
    """Return a value as YAML in one line."""
    line = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, sort_keys=False, width=10_000)
    return line.removesuffix("\n").removesuffix("\n...")


def page(settings: Strict) -> str:
    """Return a config as YAML, each key with its meaning; null sections and the choices of a preset are commented out."""
    return "\n".join(_lines(settings, 0)) + "\n"


def _lines(section: Strict, indent: int) -> list[str]:
    sentences, lines = explain.sentences(type(section)), []
    for name, field in type(section).model_fields.items():
        value, meaning = getattr(section, name), sentences.get(name, "")
        inner = explain.section(field.annotation)
        if isinstance(value, Choice) and name != "decoder":
            lines += _line(f"# {name}: {value.name}", meaning, indent)  # the name alone would drop the preset's numbers
        elif isinstance(value, Strict):
            lines += [*_line(f"{name}:", meaning, indent), *_lines(value, indent + 2)]
        elif isinstance(value, list) and value and isinstance(value[0], Strict):
            first, *others = _lines(value[0], indent + 4)
            lines += [*_line(f"{name}:", meaning, indent), first.replace("    ", "  - ", 1), *others]
        elif value is None and inner is not None:
            below = [line.replace(" " * (indent + 2), " " * indent + "# ", 1) for line in _lines(inner(), indent + 2)]
            lines += [*_line(f"{name}: null", meaning, indent), *below]
        else:
            lines += _line(f"{name}: {to_yaml(value)}", meaning, indent)
    return lines


def _line(written: str, meaning: str, indent: int) -> list[str]:
    head = " " * indent + written
    if not meaning:
        return [head]
    start = max(COLUMN, len(head) + 1)
    first, *others = textwrap.wrap(meaning, WIDTH - start - 2)
    return [f"{head:{start}}# {first}", *(f"{'':{start}}# {line}" for line in others)]
