"""A preset with any word or number of it replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice
from flowgrpo.schema.sentences import checked
from rewards.base import nearest

PresetRow = dict[str, dict[str, Any]]

Choices = Mapping[str, Mapping[str, type[Choice]]]


def resolved(
    algorithm: Mapping[str, Any], table: Mapping[str, PresetRow], choices: Choices, default: str
) -> dict[str, Any]:
    """`algorithm` as written by a user, with its preset's row filled in: each axis a map with a name.

    A word, or a map that names another choice than the preset's, replaces the axis; a map without a name, or with the
    same one, replaces single options.

    Args:
        table: of the presets.
        choices: of each axis.
        default: the preset where none is named.

    Raises:
        InputError: the preset, an axis or a choice is unknown.
    """
    name = algorithm.get("preset", default)
    if not isinstance(name, str) or name not in table:
        raise InputError(f"algorithm.preset: {name!r} is unknown, {nearest(str(name), table)}")
    row: dict[str, Any] = {"preset": name, **table[name]}
    for axis, written in algorithm.items():
        if axis == "preset":
            continue
        if axis not in choices:
            raise InputError(f"algorithm.{axis}: unknown key, {nearest(str(axis), ['preset', *choices])}")
        row[axis] = options(row[axis], written, choices[axis], f"algorithm.{axis}")
    return row


def filled(config: Any, table: Mapping[str, Mapping[str, Any]], default: str) -> Any:
    """A config with the keys beside `algorithm` that its preset sets, where it says nothing of them.

    Args:
        table: by preset, keys with a section, `model.guidance` say, and their values.
        default: the preset where none is named.
    """
    algorithm = config.get("algorithm", {}) if isinstance(config, Mapping) else None
    preset = algorithm.get("preset", default) if isinstance(algorithm, Mapping) else None
    for key, value in table.get(preset, {}).items() if isinstance(preset, str) else ():
        section, _, name = key.partition(".")
        if isinstance(own := config.get(section, {}), Mapping):
            config = {**config, section: {name: value, **own}}
    return config


def options(row: Mapping[str, Any], written: Any, choices: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The name of a choice and its options, as written by a user over a row's.

    A word, or a map that names another choice than the row's, replaces all; a map without a name, or with the same one,
    replaces single options.

    Args:
        place: where it stands, for errors.

    Raises:
        InputError: the choice is unknown.
    """
    if not isinstance(written, str | Mapping):
        raise InputError(f"{place}: {written!r} is neither a word nor a map of a name and options")
    chosen = {"name": written} if isinstance(written, str) else {str(key): value for key, value in written.items()}
    word = chosen.get("name", row.get("name"))
    if str(word) not in choices:
        raise InputError(f"{place}: {word!r} is unknown, {nearest(str(word), choices)}")
    return _merged(row if word == row.get("name") and not isinstance(written, str) else {}, chosen, word)


def _merged(row: Mapping[str, Any], options: Mapping[str, Any], word: object) -> dict[str, Any]:
    merged = {**row, **options, "name": word}
    for key, value in row.items():
        if isinstance(value, Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**value, **options[key]}
    return merged


def build_axes(written: Any, table: Mapping[str, PresetRow], choices: Choices, default: str) -> dict[str, Any]:
    """The preset's name and the choice of each axis; arguments and errors as of `resolved`."""
    if not isinstance(written, Mapping):
        raise InputError(f"algorithm: {written!r} is not a map such as {{preset: {default}}}")
    row = resolved(written, table, choices, default)
    built: dict[str, Any] = {"preset": row.pop("preset")}
    for axis, found in row.items():
        built[axis] = checked(choices[axis][found["name"]], found, f"algorithm.{axis}")
    return built
