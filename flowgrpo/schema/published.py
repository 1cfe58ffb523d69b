"""What a preset's source says of the loop and of sizes, beside what a run has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def compared(stated: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each key that a source states its value there, `source`, and in the run, `run`.

    Args:
        stated: configuration keys with dots, and values.
        run: the configuration of the run as maps within maps; what it lacks is None.
    """
    return {key: {"source": value, "run": _at(run, key)} for key, value in stated.items()}


def line(found: Mapping[str, Mapping[str, Any]], not_said: Sequence[str] = ()) -> str:
    """Return what `compared` found, in words: each key without its section, its value, and the run's if that differs.

    Args:
        not_said: keys of which the source says nothing, which stand at the end.
    """
    said = [
        f"{_name(key)} {_short(both['source'])}"
        + ("" if _agree(both["source"], both["run"]) else f" (here {_short(both['run'])})")
        for key, both in found.items()
    ]
    return ", ".join(said) + (f"; not said: {', '.join(map(_name, not_said))}" if not_said else "")


def _agree(source: Any, run: Any) -> bool:
    """Whether a run has what a source states; of a map, what it states of it."""
    if isinstance(source, Mapping) and isinstance(run, Mapping):
        return all(_agree(value, run.get(key)) for key, value in source.items())
    return source == run


def _name(key: str) -> str:
    return key.partition(".")[2].removeprefix("call.")


def _at(run: Mapping[str, Any], key: str) -> Any:
    found: Any = run
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k} {_short(v)}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
