"""A preset with any word or number of it replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowgrpo.errors import InputError, nearest
from flowgrpo.schema.base import Choice
from flowgrpo.schema.sentences import checked

Row = dict[str, dict[str, Any]]

Choices = Mapping[str, Mapping[str, type[Choice]]]


def resolved(algorithm: Mapping[str, Any], table: Mapping[str, Row], choices: Choices, default: str) -> dict[str, Any]:
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
        if not isinstance(written, (str, Mapping)):
            raise InputError(f"algorithm.{axis}: {written!r} is neither a name nor a map with a name")
        options = {"name": written} if isinstance(written, str) else dict(written)
        word = options.get("name", row[axis]["name"])
        if not isinstance(word, str) or word not in choices[axis]:
            raise InputError(f"algorithm.{axis}: {word!r} is unknown, {nearest(str(word), choices[axis])}")
        row[axis] = _merged(
            row[axis] if word == row[axis]["name"] and not isinstance(written, str) else {}, options, word
        )
    return row


def _merged(row: Mapping[str, Any], options: Mapping[str, Any], word: str) -> dict[str, Any]:
    merged = {**row, **options, "name": word}
    for key, value in row.items():
        if isinstance(value, Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**value, **options[key]}
    return merged


def build_axes(written: Any, table: Mapping[str, Row], choices: Choices, default: str) -> dict[str, Any]:
    """The preset's name and the choice of each axis; arguments and errors as of `resolved`."""
    if not isinstance(written, Mapping):
        raise InputError(f"algorithm: {written!r} is not a map such as {{preset: {default}}}")
    row = resolved(written, table, choices, default)
    built: dict[str, Any] = {"preset": row.pop("preset")}
    for axis, options in row.items():
        built[axis] = checked(choices[axis][options["name"]], options, f"algorithm.{axis}")
    return built
