"""Validation of user input: pydantic's errors become one sentence."""

from __future__ import annotations

import re
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Strict
from rewards.base import nearest

Model = TypeVar("Model", bound=Strict)


def checked(model: type[Model], written: Any, place: str = "") -> Model:
    """Validate a section. Raises InputError; `place` is its dotted key, empty for a whole configuration."""
    try:
        return model.model_validate(written)
    except ValidationError as error:
        raise InputError(explain_validation_error(error, model, place)) from None


def explain_validation_error(error: ValidationError, model: type[Strict], prefix: str = "") -> str:
    """Describe the first unknown key, or else the first wrong value, with its place and the nearest valid choice."""
    # A union gives one error per member. Prefer others to that of a callable, or of a single value if a list was given.
    first = min(
        error.errors(),
        key=lambda e: (
            e["type"] != "extra_forbidden",
            e["type"] == "callable_type",
            e["type"] in ("float_type", "literal_error") and isinstance(e["input"], list),
        ),
    )
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    named, unknown = (first["loc"][:-1], first["loc"][-1:]) if kind == "extra_forbidden" else (first["loc"], ())
    path = [*filter(_is_key, named), *unknown]
    place = ".".join(str(part) or repr(part) for part in (*([prefix] if prefix else []), *path))
    if kind == "value_error":  # our own sentence
        return str(context["error"])
    if kind == "extra_forbidden":
        keys = [key for key in _keys_at(model, path[:-1]) if key != "name" or not prefix]
        word = str(path[-1])
        elsewhere = {} if prefix else _places(model)
        close = [] if get_close_matches(word, keys, 1) else get_close_matches(word, elsewhere, 1, 0.8)
        if word in elsewhere or close:
            return f"{place}: unknown key, did you mean {elsewhere[word if word in elsewhere else close[0]]!r}?"
        of_word = model.model_fields["name"].default if prefix and "name" in model.model_fields else None
        if of_word and len(path) == 1 and not get_close_matches(word, keys, 1):
            return f"{place}: unknown key of {of_word}, which has {', '.join(keys) or 'no options'}"
        return f"{place}: unknown key, {nearest(word, keys) if keys else 'it has no options'}"
    if kind == "missing":
        return f"{place}: required, but not given"
    if kind == "literal_error":
        choices = [a or b.lower() for a, b in re.findall(r"'([^']*)'|(\d+|False|True)", context["expected"])]
        far = len(choices) == 2 and not get_close_matches(str(value), choices, 1, 0.8)
        which = f"choose one of {', '.join(choices)}" if far else nearest(str(value), choices)
        return f"{place}: {value!r} is not allowed, {which}"
    if kind == "model_type":
        return f"{place}: {value!r} is not a map of keys such as {', '.join(_keys_at(model, path)[:3])}"
    if kind == "string_pattern_mismatch":
        return f"{place}: {value!r} may hold only letters, digits, '.', '_' and '-', and not begin with '.'"
    return f"{place}: {value!r} is wrong, {first['msg'][0].lower()}{first['msg'][1:]}"


def _is_key(part: Any) -> bool:
    """Return whether a part of pydantic's error location is a key or an index, not the name of a union's type."""
    return not (isinstance(part, str) and re.search(r"[\[(]|^(str|float|constrained-float|literal)$", part))


def has_key(model: type[Strict], place: str) -> bool:
    """Return whether a configuration has a dotted key, written without list indices."""
    *parents, last = place.split(".")
    section: type[Strict] | None = model
    for part in parents:
        field = None if section is None else section.model_fields.get(part)
        section = None if field is None else _section(field.annotation)
    return section is not None and last in section.model_fields


def find_key(model: type[Strict], name: str) -> str | None:
    """Return the key of the fewest parts whose last part is `name`, or a dotted `name` itself; None without such a key."""
    if "." in name:
        return name if has_key(model, name) else None
    return _places(model).get(name)


def _places(model: type[Strict]) -> dict[str, str]:
    """Return the dotted keys of a configuration outside of lists by their last part; of several, the shortest."""
    places: dict[str, str] = {}
    waiting: list[tuple[str, type[Strict]]] = [("", model)]
    while waiting:
        place, section = waiting.pop(0)
        for key, field in section.model_fields.items():
            places.setdefault(key, f"{place}{key}")
            if (inner := _section(field.annotation)) is not None:
                waiting.append((f"{place}{key}.", inner))
    return places


def _section(annotation: Any) -> type[Strict] | None:
    """Return the section class of `Section` or `Section | None`; None for other annotations, such as lists."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return next((found for member in members if (found := _section(member))), None)


def _keys_at(model: type[Strict], path: list[Any]) -> list[str]:
    below_map = False  # the next part is a user-defined key
    for part in path:
        if isinstance(part, int) or below_map:
            below_map = False
            continue
        annotation = model.model_fields[part].annotation
        while not (isinstance(annotation, type) and issubclass(annotation, Strict)):
            below_map = get_origin(annotation) is dict
            annotation = next(a for a in get_args(annotation)[below_map:] if a is not type(None))
        model = annotation
    return list(model.model_fields)
