"""The metric lines of a run's folder, as anyone may read them: nothing that computes is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowgrpo.data import tables
from flowgrpo.errors import InputError


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metric lines of a run; none if it has none. A last line that was cut off is left out, with a warning.

    Raises:
        InputError: a line is broken, or says what no metric line says.
    """
    return [_checked(line, place) for place, line in tables.log(folder / "metrics.jsonl")]


def _checked(line: dict[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(line.get("step"), int) or not isinstance(line.get("phase"), str):
        raise InputError(f"{place}: a line needs a step, a whole number, and a phase, a text")
    for key, value in line.items():
        if key != "phase" and value is not None and not is_number(value):
            raise InputError(f"{place}: {key} is {value!r}, not a number or null")
    return line


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that can be computed with: not infinite, not NaN, no integer beyond floats."""
    return isinstance(value, int | float) and -1e300 < value < 1e300
