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
    """What a reward's docstring says of it."""
    found = find(name)
    said = inspect.getdoc(found.func if isinstance(found, partial) else found) or "It has no docstring."
    settled = "".join(f"\n\n{key}: {value}" for key, value in getattr(found, "keywords", {}).items())
    return said + settled
