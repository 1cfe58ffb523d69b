"""The rewards that can be used by name: built in, and those that installed packages announce."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from rewards import BUILT_IN
from rewards.base import ENTRY_POINTS, find


def catalogue() -> list[dict[str, Any]]:
    """One row per reward: name, inputs, range, weights, licence; None where an installed package does not say."""
    built_in = [{"name": name, **asdict(card)} for name, card in BUILT_IN.items()]
    for row in built_in:
        del row["target"], row["options"]
    unknown = dict.fromkeys(("inputs", "range", "weights", "licence"))
    installed = [{"name": point.name, **unknown} for point in entry_points(group=ENTRY_POINTS)]
    return built_in + installed


def description(name: str) -> str:
    """What a reward's docstring says of it, its options, and a line for a config."""
    found = find(name)
    settled = found.keywords if isinstance(found, partial) else {}
    made = found.func if isinstance(found, partial) else found
    said = inspect.getdoc(made) or "It has no docstring."
    parameters = [p for p in inspect.signature(found).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [p.name if p.default is p.empty else f"{p.name} ({p.default})" for p in parameters]
    needed = ", ".join(f"{p.name}: ..." for p in parameters if p.default is p.empty)
    use = f"{{use: {name}, options: {{{needed}}}}}" if needed and inspect.isclass(made) else f"{{use: {name}}}"
    lines = [said, "".join(f"{key}: {value}\n" for key, value in settled.items())]
    if inspect.isclass(made):
        lines.append(f"Options: {', '.join(options) or 'none'}")
    return "\n\n".join([*filter(None, lines), f"In a config: rewards: [{use}]"])
