"""Explanations of config keys: their description (the docstring under a field), allowed values and default."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice, Strict
from flowgrpo.schema.imports.sources import definitions
from flowgrpo.schema.validation import find_key
from rewards.base import nearest

WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", dict: "a map", Any: "anything"}
BOUNDS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The explanation of one config key."""

    key: str  # with dots
    meaning: str  # its description: the docstring under its field
    takes: str  # allowed values, in words
    default: Any  # `PydanticUndefined` if required
    value: Any  # in the given configuration
    below: dict[str, str]  # descriptions of the keys below it
    home: str  # the defining module


def sentences(model: type[Strict]) -> dict[str, str]:
    """Return the description of each field of a section or choice, inherited fields included."""
    texts: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if issubclass(owner, Strict) and owner is not Strict:
            body = definitions(owner.__module__)[owner.__name__].body
            for field, below in pairwise(body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                        texts[name] = " ".join(sentence.split())
    return texts


def explain(settings: Strict, key: str) -> Explained:
    """Explain a dotted key, written without list indices. Raises InputError if the configuration has no such key."""
    model: type[Strict] | None = type(settings)
    value: Any = settings
    parts = key.split(".")
    for i, part in enumerate(parts):
        fields = {} if model is None else model.model_fields
        field = fields.get(part)
        if model is None or field is None:
            place = ".".join(parts[:i])
            if not fields:
                raise InputError(f"--explain {key}: {place} has no keys of its own")
            below = None if i else find_key(type(settings), part)
            known = [".".join((*parts[:i], name)) for name in fields]
            close = f"did you mean {below!r}?" if below else nearest(".".join(parts[: i + 1]), known)
            raise InputError(f"--explain {key}: there is no such key, {close}")
        owner, value = model, _field_of(value, part)
        model = type(value) if isinstance(value, Strict) else section(field.annotation)
    keys = model.model_fields.keys() - {"name"} if model else set()
    return Explained(
        key=key,
        meaning=sentences(owner).get(parts[-1], ""),
        takes=takes(field),
        default=field.default,
        value=value,
        below={name: text for name, text in sentences(model).items() if name in keys} if model else {},
        home=owner.__module__,
    )


def _field_of(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [getattr(item, name) for item in value]
    if isinstance(value, dict):
        return {key: getattr(item, name) for key, item in value.items()}
    return getattr(value, name, None)


def section(annotation: Any) -> type[Strict] | None:
    """Return the first section class in an annotation such as `list[Section] | None`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    return next((found for inner in get_args(annotation) if (found := section(inner))), None)


def takes(field: FieldInfo) -> str:
    """Return the allowed values of a field, in words."""
    rules = [(rule, name) for rule in field.metadata for name in BOUNDS if hasattr(rule, name)]
    bounds = [BOUNDS[name].format(f"{getattr(rule, name):g}") for rule, name in rules]
    return ", ".join([_words(field.annotation), *bounds])


def _words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(inner[0])
    if origin is Literal:
        return " | ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in inner)
    if origin in (Union, UnionType):
        written = [one for one in inner if one is not NoneType and get_origin(one) is not Callable]  # not in YAML
        return " or ".join(map(_words, written)) + " or null" * (NoneType in inner)
    if origin in (list, tuple):
        return f"a list, each {_words(inner[0])}" if inner else "a list"
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        return "a word or a map with a name"
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return "a map of keys"
    if origin in (dict, Mapping):
        return "a map"
    return WORDS.get(annotation, str(annotation))
