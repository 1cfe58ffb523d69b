"""Readers of the manifest and metrics in a run's folder; this module does not import PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowgrpo.data import tables
from flowgrpo.errors import InputError


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metric lines of a run. A truncated last line is skipped; a malformed line raises InputError."""
    lines = tables.log(folder / "metrics.jsonl")
    for place, line in lines:
        if not isinstance(line.get("step"), int) or not isinstance(line.get("phase"), str):
            raise InputError(f"{place}: a line needs a step, a whole number, and a phase, a text")
        for key, value in line.items():
            if key != "phase" and value is not None and not is_number(value):
                raise InputError(f"{place}: {key} is {value!r}, not a number or null")
    return [line for _, line in lines]


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a usable number: finite, and no integer beyond float range."""
    return isinstance(value, int | float) and -1e300 < value < 1e300


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the manifest in `folder`. Truncated and malformed lines are treated as by `read_metrics`."""
    lines = tables.log(folder / "manifest.jsonl")
    for place, line in lines:
        file, rewards = line.get("file"), line.get("rewards", {})
        if not isinstance(file, str) or not isinstance(line.get("prompt"), str):
            has = ", ".join(line) or "nothing"
            raise InputError(f"{place}: a line needs a file and a prompt, both texts, it has {has}")
        for key, kinds in (("seed", int | None), ("step", int)):
            if not isinstance(line.get(key, 0), kinds):
                raise InputError(f"{place}: {key} is {line[key]!r}, not a whole number")
        if not isinstance(rewards, dict) or not all(value is None or is_number(value) for value in rewards.values()):
            raise InputError(f"{place}: rewards is {rewards!r}, not a map from names to numbers or null")
        check_inside(folder, file, place)
    return [line for _, line in lines]


def check_inside(folder: Path, file: str, place: str) -> None:
    """Raise InputError if a file name leads out of the folder, by an absolute path, by `..` or by a link."""
    try:
        inside = not Path(file).is_absolute() and (folder / file).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, a circle of links
        raise InputError(f"{place}: {file[:80]!r} is not the name of a file ({error})") from None
    if not inside:
        raise InputError(f"{place}: {file!r} leads out of {folder}; name files in it")
