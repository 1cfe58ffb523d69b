"""Compare loop settings and sizes that a preset's source states with those of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def compared(stated: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stated value (`source`) and the run's (`run`, None if missing) of each dotted key."""
    return {key: {"source": value, "run": _at(run, key)} for key, value in stated.items()}


def line(found: Mapping[str, Mapping[str, Any]], not_said: Sequence[str] = ()) -> str:
    """Describe what `compared` returned: each key with the source's value, and the run's if different; then `not_said`."""
    parts = [
        f"{_name(key)} {_short(both['source'])}"
        + ("" if _agree(both["source"], both["run"]) else f" (here {_short(both['run'])})")
        for key, both in found.items()
    ]
    return ", ".join(parts) + (f"; not said: {', '.join(map(_name, not_said))}" if not_said else "")


def _agree(source: Any, run: Any) -> bool:
    if isinstance(source, Mapping) and isinstance(run, Mapping):
        return all(_agree(value, run.get(key)) for key, value in source.items())
    return source == run


def _name(key: str) -> str:
    return key.partition(".")[2].removeprefix("call.")


def _at(run: Mapping[str, Any], key: str) -> Any:
    value: Any = run
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k} {_short(v)}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
