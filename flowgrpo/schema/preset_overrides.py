"""Overrides of presets: a config replaces single axes, or single options of an axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice
from flowgrpo.schema.validation import checked
from rewards.base import nearest

PresetRow = dict[str, dict[str, Any]]

Choices = Mapping[str, Mapping[str, type[Choice]]]


def build_axes(written: Any, table: Mapping[str, PresetRow], choices: Choices, default: str) -> dict[str, Any]:
    """Return the preset's name (key `preset`) and the validated choice of each axis.

    Raises InputError if the preset, an axis, a choice or an option is wrong.

    Args:
        written: the section `algorithm` as the user wrote it; without a name the preset is `default`.
        table: the choice of each axis, by preset.
        choices: the allowed choices, by axis and name.
    """
    if not isinstance(written, Mapping):
        hint = f", did you mean algorithm.preset={written}?" if written in [*table] else ""
        raise InputError(f"algorithm: {written!r} is not a map such as {{preset: {default}}}{hint}")
    name = written.get("preset", default)
    if not isinstance(name, str) or name not in table:
        raise InputError(f"algorithm.preset: {name!r} is unknown, {nearest(str(name), table)}")
    row = dict(table[name])
    for axis, value in written.items():
        if axis == "preset":
            continue
        if axis not in choices:
            raise InputError(f"algorithm.{axis}: unknown key, {nearest(str(axis), ['preset', *choices])}")
        row[axis] = options(row[axis], value, choices[axis], f"algorithm.{axis}")
    built = {axis: checked(choices[axis][chosen["name"]], chosen, f"algorithm.{axis}") for axis, chosen in row.items()}
    return {"preset": name, **built}


def filled(config: Any, table: Mapping[str, Mapping[str, Any]], default: str) -> Any:
    """Return the config with its preset's values for keys outside `algorithm`, except keys that the user wrote.

    `table` holds the values of each preset, by dotted key; `default` is the preset if none is named.
    """
    algorithm = config.get("algorithm", {}) if isinstance(config, Mapping) else None
    preset = algorithm.get("preset", default) if isinstance(algorithm, Mapping) else None
    for key, value in table.get(preset, {}).items() if isinstance(preset, str) else ():
        config = _fill(config, key, value)
    return config


def _fill(written: Mapping[str, Any], key: str, value: Any) -> Mapping[str, Any]:
    """Return the section as the user wrote it, with the value of a dotted key unless it is there."""
    name, _, rest = key.partition(".")
    if not rest:
        return {name: value, **written}
    inner = written.get(name, {})
    return {**written, name: _fill(inner, rest, value)} if isinstance(inner, Mapping) else written


def options(row: Mapping[str, Any], written: Any, choices: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Merge an axis as `written` by the user into the preset's `row`; return the name and the options of the choice.

    A string replaces the row, and so does a map with another name. A map without a name, or with the row's name, replaces
    single options. Raises InputError with the dotted key `place` if the choice is unknown.
    """
    if not isinstance(written, str | Mapping):
        raise InputError(f"{place}: {written!r} is neither a word nor a map of a name and options")
    chosen: dict[str, Any] = {"name": written} if isinstance(written, str) else {str(k): v for k, v in written.items()}
    word = chosen.get("name", row.get("name"))
    if str(word) not in choices:
        raise InputError(f"{place}: {word!r} is unknown, {nearest(str(word), choices)}")
    if isinstance(written, str) or word != row.get("name"):
        return {**chosen, "name": word}
    merged = {**row, **chosen, "name": word}
    for key, value in row.items():
        if isinstance(value, Mapping) and isinstance(chosen.get(key), Mapping):
            merged[key] = {**value, **chosen[key]}
    return merged
