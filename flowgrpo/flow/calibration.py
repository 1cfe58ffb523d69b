"""What a run keeps of its calibration: the noise level of each step, and the metric line it told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.training.folders import replace_text
from flowgrpo.training.report import is_number

FILE = "calibration.json"
NUMBERS = ("step", "cost/model_evaluations", "cost/decoded", "time/calibration")  # of the metric line


@dataclass(frozen=True)
class Calibration:
    """The noise `levels` of the steps, and the metric `line` of how they were found."""

    levels: list[float]
    line: dict[str, Any]


def read(folder: Path, begun: bool) -> Calibration | None:
    """The calibration in a run's folder; None if there is none.

    Args:
        begun: whether the run has been trained with it, so that it must be there.

    Raises:
        InputError: it is missing, cannot be read, or is not what `write` writes.
    """
    path = folder / FILE
    if not path.is_file():
        if begun:
            raise InputError(f"run.resume: {path} is missing, which holds the noise levels that the run began with")
        return None
    found = tables.document(path)
    try:
        levels, line = found["levels"], found["metrics"]
        whole = line.keys() == {"phase", *NUMBERS} and line["phase"] == "calibration" and len(levels) > 0
        whole = whole and all(is_number(level) and level >= 0 for level in levels)
        whole = whole and all(is_number(line[name]) for name in NUMBERS)
    except (LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise InputError(f"{path} is not what a calibration writes; begin again with another run.name")
    return Calibration([float(level) for level in levels], line)


def write(folder: Path, calibration: Calibration, rounds: Sequence[dict[str, Any]]) -> None:
    """Keep a calibration in a run's folder, with the levels and counts of its rounds, all at once."""
    written = {"levels": calibration.levels, "rounds": rounds, "metrics": calibration.line}
    replace_text(folder / FILE, json.dumps(written, indent=1) + "\n")
