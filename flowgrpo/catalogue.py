"""The rewards that can be used by name: built in, and those that installed packages announce."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any

from rewards import BUILT_IN
from rewards.base import ENTRY_POINTS, find


def catalogue() -> list[dict[str, Any]]:
    """One row per reward: name, inputs, range, weights, licence; None where an installed package does not say."""
    built_in = [{"name": name, **asdict(card)} for name, card in BUILT_IN.items()]
    for row in built_in:
        del row["target"]
    unknown = dict.fromkeys(("inputs", "range", "weights", "licence"))
    installed = [{"name": point.name, **unknown} for point in entry_points(group=ENTRY_POINTS)]
    return built_in + installed


def description(name: str) -> str:
    """What a reward's docstring says of it, its options, and a line for a config."""
    found = find(name)
    said = inspect.getdoc(found) or "It has no docstring."
    parameters = inspect.signature(found).parameters.values() if inspect.isclass(found) else ()
    options = [
        p.name if p.default is p.empty else f"{p.name} ({p.default})" for p in parameters if p.kind != p.VAR_KEYWORD
    ]
    needed = ", ".join(f"{p.name}: ..." for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD)
    asked = f", options: {{{needed}}}" if needed else ""
    return f"{said}\n\nOptions: {', '.join(options) or 'none'}\nIn a config: rewards: [{{use: {name}{asked}}}]"
