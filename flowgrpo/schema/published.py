"""Comparison of a run with the loop settings and sizes that its preset's paper or code states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def compared(stated: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, for each dotted key of `stated`, its value (`source`) and the run's value (`run`; None if missing)."""
    return {key: {"source": value, "run": _at(run, key)} for key, value in stated.items()}


def line(comparison: Mapping[str, Mapping[str, Any]], not_said: Sequence[str] = ()) -> str:
    """Format the result of `compared` as one line; it ends with the keys that the source does not state (`not_said`)."""
    parts = [
        f"{_name(key)} {_short(both['source'])}"
        + ("" if _agree(both["source"], both["run"]) else f" (here {_short(both['run'])})")
        for key, both in comparison.items()
    ]
    return ", ".join(parts) + (f"; not said: {', '.join(map(_name, not_said))}" if not_said else "")


def plan_lines(planned: Mapping[str, Any], models: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a plan's line, (label, text), of its preset's published numbers; [] if there are none.

    `models` names the model that the source of a preset trained, if it is known here.
    """
    preset, comparison = planned["preset"], planned["published"]
    model = f"for {models[preset]}" if preset in models else "perhaps for another model"
    text = f"of {preset}'s source, {model}: {line(comparison, planned.get('not_said', ()))}"
    return [("published", text)] * bool(comparison)


def _agree(source: Any, run: Any) -> bool:
    if isinstance(source, Mapping) and isinstance(run, Mapping):
        return all(_agree(value, run.get(key)) for key, value in source.items())
    return source == run


def _name(key: str) -> str:
    return (
        key if key == "model.guidance" else key.partition(".")[2].removeprefix("call.")
    )  # not of the call, as scales are


def _at(run: Mapping[str, Any], key: str) -> Any:
    value: Any = run
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k} {_short(v)}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
