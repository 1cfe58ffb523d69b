"""Differences between the settings or the environments of several runs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """A flat key, such as `train.learning_rate`, with its value in each map as text; `ABSENT` where it is missing."""

    key: str
    values: list[str]


def differences(maps: Sequence[Mapping[str, str]], ignored: Collection[str] = ()) -> tuple[list[Difference], int]:
    """Compare flat maps: return the keys whose values differ, and the number of other keys. Skip `ignored` keys."""
    keys = [key for key in dict.fromkeys(key for each in maps for key in each) if key not in ignored]
    rows = [Difference(key, [each.get(key, ABSENT) for each in maps]) for key in keys]
    differing = [row for row in rows if len(set(row.values)) > 1]
    return differing, len(rows) - len(differing)


def in_words(value: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a map and turn its values into texts: strings stay as they are, other values become JSON."""
    return {
        key: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False, default=str)
        for key, each in flat(value).items()
    }


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Flatten maps and lists of maps: `{"a": {"b": 1}}` becomes `{"a.b": 1}`; other lists and empty maps are values."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        inner = dict(enumerate(value))
    elif isinstance(value, Mapping) and (value or not place):
        inner = value
    else:
        return {place: value}
    return {
        key: each
        for name, part in inner.items()
        for key, each in flat(part, f"{place}.{name}" if place else str(name)).items()
    }
