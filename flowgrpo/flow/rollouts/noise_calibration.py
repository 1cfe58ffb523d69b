"""The noise level of each step, found before a run begins and kept in its folder with the metric line of the search."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods.credit.rules import calibrated, step_signs
from flowgrpo.flow.methods.kernel import Preserving
from flowgrpo.flow.rollouts.rollout import Batch
from flowgrpo.training.run.run_files import is_number
from flowgrpo.training.run.run_folder import replace_text
from flowgrpo.training.state import RunState
from samplers.kernels import Kernel, slope
from samplers.trees import Tree

FILE = "calibration.json"
NUMBERS = ("step", "cost/model_evaluations", "cost/decoded", "time/calibration")  # of the metric line


@dataclass(frozen=True)
class Calibration:
    """The noise level of each step (`levels`), and the metric `line` of the search for them."""

    levels: list[float]
    line: dict[str, Any]


def read(folder: Path, begun: bool) -> Calibration | None:
    """Return the calibration in a run's folder; None where the folder has no calibration yet.

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
    """Write a calibration to a run's folder in one atomic step, with the levels and counts of its rounds."""
    written = {"levels": calibration.levels, "rounds": rounds, "metrics": calibration.line}
    replace_text(folder / FILE, json.dumps(written, indent=1) + "\n")


def calibrate(run: RunState, levels: list[float], roll_out: Callable[[int, list[float]], Batch]) -> list[float]:
    """The noise level of each step: what the run's folder has, or what a search finds; arguments as of `search`."""
    kept = read(run.folder, begun=run.done > 0)
    if kept is None:
        kept = search(run, levels, roll_out)
    elif run.done:
        return kept.levels
    run.report.write(kept.line)  # also that of a run that was killed before its first checkpoint, which was dropped
    return kept.levels


def level_steps(kernel: str, tree: Tree, step: float) -> list[float]:
    """By how much each level changes where the noise g of its step, std / sqrt(sigma - sigma_next), changes by `step`.

    A level is g itself for `dance_sde`, and g over sqrt(sigma / (1 - sigma)) for `flow_sde`; for kernels whose g is not
    proportional to the level it is g at level 1 that counts. A step that has no noise at all changes by `step`.
    """
    whole = Kernel(kernel, 1.0)
    units = [slope(whole, a, b, tree.sigma_cap)[1] / math.sqrt(a - b) for a, b in pairwise(tree.sigmas)]
    return [step / unit if unit else step for unit in units]


def search(run: RunState, levels: list[float], roll_out: Callable[[int, list[float]], Batch]) -> Calibration:
    """Find the noise level of each step, by rollouts before the first iteration, and write it to the run's folder.

    Args:
        levels: to begin with.
        roll_out: by some levels, at a number of an iteration below 0, whose noise is its own.
    """
    assert isinstance(run.config, Config)
    kernel, started = run.config.algorithm.kernel, time.perf_counter()
    settings = kernel.calibrate
    assert settings is not None
    highest = 1.0 if isinstance(kernel, Preserving) else math.inf
    evaluations, decoded, rounds = run.evaluations, 0, []
    for past in range(settings.rounds):
        batch = roll_out(past - settings.rounds, levels)
        decoded += batch.decoded
        signs = step_signs(batch.tree, run.combination.total(batch.scores.values))
        positive, negative = run.collectives.sum_shares(signs)
        rounds.append({"levels": levels, "positive": positive.tolist(), "negative": negative.tolist()})
        steps = level_steps(kernel.name, batch.tree, settings.step)
        levels = calibrated(levels, positive, negative, steps=steps, difference=settings.difference, highest=highest)
    costs = {"cost/model_evaluations": run.evaluations - evaluations, "cost/decoded": decoded}
    line = {
        "step": 0,
        "phase": "calibration",
        **run.collectives.totals(costs),
        "time/calibration": time.perf_counter() - started,
    }
    found = Calibration(levels, line)
    if run.accelerator.is_main_process:
        write(run.folder, found, rounds)
    return found
