"""Strict YAML for configs: unique keys, bounded size and depth, one-sentence errors."""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from flowgrpo.data import tables
from flowgrpo.errors import InputError

LARGEST_TEXT = 1 << 18  # characters of YAML
LARGEST_VALUE = 1 << 17  # values, with aliases expanded


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 3e-4 as a number and 0:0.6 as a text, and refuses repeated keys and huge alias expansions."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Compose the next node, and check its depth and its size with aliases expanded."""
        event = self.peek_event()
        if self._depth == tables.DEEPEST:
            self._refuse(event, f"lists and maps are nested deeper than {tables.DEEPEST}")
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            inner = node.value if isinstance(node, yaml.CollectionNode) else []
            inner = chain(*inner) if isinstance(node, yaml.MappingNode) else inner
            self._sizes[node] = 1 + sum(self._sizes[part] for part in inner)
        if node not in self._sizes:
            self._refuse(event, f"*{event.anchor} stands in what it stands for")
        if self._sizes[node] > LARGEST_VALUE:
            self._refuse(event, f"holds more than {LARGEST_VALUE} values where its aliases are followed")
        return node

    def _refuse(self, event: Any, problem: str) -> None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a map, and refuse repeated keys."""
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            keys.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


def _decimal(tag: str, pattern: re.Pattern[str]) -> tuple[str, re.Pattern[str]]:
    """Return a resolver that leaves out base-60 numbers: YAML 1.1 reads 1:30 as 90."""
    if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        return tag, pattern
    return tag, re.compile(f"(?!.*:)(?:{pattern.pattern})", pattern.flags)


_Loader.yaml_implicit_resolvers = {
    first: [_decimal(*form) for form in forms] for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


@lru_cache(maxsize=8)
def _parse(text: str) -> Any:
    """Parse a YAML text; cached, because reports read a run's config many times."""
    return yaml.load(text, _Loader)


def parse_yaml(text: str, place: str) -> Any:
    """Return the value of a YAML text. Raises InputError if the text is not YAML; names `place` and the line."""
    if len(text) > LARGEST_TEXT:
        raise InputError(f"{place}: has {len(text)} characters, at most {LARGEST_TEXT} are read")
    try:
        parsed = copy.deepcopy(_parse(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None and "\n" in text else ""
        words = getattr(error, "problem", None) or " ".join(str(error).split())
        tab = "; indent with spaces, YAML allows no tabs" if "'\\t'" in words else ""
        raise InputError(f"{place}{line}: not valid YAML ({words}){tab}{_name_bracket(error)}") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # impossible dates, !!int of a word
        raise InputError(f"{place}: not valid YAML (a value is not of its kind: {error})") from None
    tables.check_plain(parsed, place)
    return parsed


def _name_bracket(error: Any) -> str:
    """Return the end of an error message that names the line of an open bracket, if it is an earlier line; or ""."""
    context = getattr(error, "context", None)
    if context not in ("while parsing a flow mapping", "while parsing a flow sequence"):
        return ""
    opened, found = error.context_mark.line, error.problem_mark.line
    return f"; the bracket of line {opened + 1} is still open there" if opened < found else ""


def read_map(path: Path) -> dict[str, Any]:
    """Return the map of a YAML config file, unvalidated. Raises InputError if it cannot be read, or is not a map."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_TEXT + 1).decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    written = parse_yaml(text, str(path))
    if not isinstance(written, dict):
        kind = "an empty file" if written is None else type(written).__name__
        raise InputError(f"{path}: a config is a map of keys such as model and rewards, not {kind}")
    return written
