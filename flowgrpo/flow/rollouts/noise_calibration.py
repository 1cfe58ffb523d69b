"""Noise calibration: search the noise level of each step before a run begins, and keep the levels in its folder."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods.credit.rules import adjust_levels, step_signs
from flowgrpo.flow.methods.kernel_options import Preserving
from flowgrpo.flow.rollouts.rollout import Batch
from flowgrpo.training.run.run_files import is_number
from flowgrpo.training.run.run_folder import replace_text
from flowgrpo.training.state import RunState
from samplers.kernels import Kernel, slope
from samplers.trees import Tree

FILE = "calibration.json"
NUMBERS = ("step", "cost/model_evaluations", "cost/decoded", "time/calibration")  # numeric keys of the metric line


def read(folder: Path, begun: bool) -> dict[str, Any] | None:
    """Return the calibration in a run's folder, None if there is none.

    Raise InputError if it is malformed, or missing although the run has begun.
    """
    path = folder / FILE
    if not path.is_file():
        if begun:
            raise InputError(f"run.resume: {path} is missing, which holds the noise levels that the run began with")
        return None
    document = tables.document(path)
    try:
        levels, line = document["levels"], document["metrics"]
        whole = line.keys() == {"phase", *NUMBERS} and line["phase"] == "calibration" and len(levels) > 0
        whole = whole and all(is_number(level) and level >= 0 for level in levels)
        whole = whole and all(is_number(line[name]) for name in NUMBERS)
    except (LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise InputError(f"{path} is not what a calibration writes; begin again with another run.name")
    return document | {"levels": [float(level) for level in levels]}


def calibrate(run: RunState, levels: list[float], roll_out: Callable[[int, list[float]], Batch]) -> list[float]:
    """Return the noise level of each step, from the run's folder or else from a search; arguments as in `search`."""
    calibration = read(run.folder, begun=run.done > 0) or search(run, levels, roll_out)
    if not run.done:  # a run that was killed before its first checkpoint lost this line
        run.report.write(calibration["metrics"])
    return calibration["levels"]


def level_steps(kernel: str, tree: Tree, step: float) -> list[float]:
    """Return the change of each level that changes the noise g of its step by `step`.

    g is std / sqrt(sigma - sigma_next). The level is g itself for `dance_sde`, and g / sqrt(sigma / (1 - sigma)) for
    `flow_sde`. For kernels whose g is not proportional to the level, the change is that at level 1. The level of a step
    without noise changes by `step`.
    """
    at_level_1 = Kernel(kernel, 1.0)
    units = [slope(at_level_1, a, b, tree.sigma_cap)[1] / math.sqrt(a - b) for a, b in pairwise(tree.sigmas)]
    return [step / unit if unit else step for unit in units]


def search(run: RunState, levels: list[float], roll_out: Callable[[int, list[float]], Batch]) -> dict[str, Any]:
    """Search the noise level of each step by rollouts before the first iteration; write the result to the run's folder.

    Args:
        levels: first levels, one for each step.
        roll_out: returns a scored rollout for an iteration number and noise levels. The numbers here are negative, so
            that the rollouts have their own noise.

    Returns:
        `levels`; `rounds`, the levels and counts of each round; and `metrics`, a line for the metrics file.
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
        positive, negative = run.collectives.sum_shards(signs)
        rounds.append({"levels": levels, "positive": positive.tolist(), "negative": negative.tolist()})
        steps = level_steps(kernel.name, batch.tree, settings.step)
        levels = adjust_levels(levels, positive, negative, steps=steps, difference=settings.difference, highest=highest)
    costs = {"cost/model_evaluations": run.evaluations - evaluations, "cost/decoded": decoded}
    line = {
        "step": 0,
        "phase": "calibration",
        **run.collectives.totals(costs),
        "time/calibration": time.perf_counter() - started,
    }
    calibration = {"levels": levels, "rounds": rounds, "metrics": line}
    if run.accelerator.is_main_process:
        replace_text(run.folder / FILE, json.dumps(calibration, indent=1) + "\n")
    return calibration
