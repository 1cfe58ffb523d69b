"""What two or more runs were set to, or ran on, that is not alike: flat keys, and the value of each run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """A key, such as `train.learning_rate`, and its value in each map as text; `ABSENT` where a map lacks it."""

    key: str
    values: list[str]


@dataclass(frozen=True)
class Differences:
    """Of several maps: the keys whose values differ, and how many keys have the same value in all."""

    differing: list[Difference]
    agreeing: int


def differences(written: Sequence[Mapping[str, str]], ignored: Collection[str] = ()) -> Differences:
    """What differs between maps as `in_words` writes them.

    Args:
        ignored: keys that are neither listed nor counted.
    """
    keys = [key for key in dict.fromkeys(key for each in written for key in each) if key not in ignored]
    rows = [Difference(key, [each.get(key, ABSENT) for each in written]) for key in keys]
    differing = [row for row in rows if len(set(row.values)) > 1]
    return Differences(differing, len(rows) - len(differing))


def in_words(value: Mapping[str, Any]) -> dict[str, str]:
    """The values of a map by their flat keys: texts as they are, the others as JSON, in which a date is a text.

    Raises:
        TypeError: a map in a list has keys that JSON cannot write.
    """
    return {key: _text(each) for key, each in flat(value).items()}


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Maps, and lists of maps, with the way to each value as its key: `{"a": {"b": 1}}` is `{"a.b": 1}`.

    Other lists are values, and so are maps that hold nothing.
    """
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
