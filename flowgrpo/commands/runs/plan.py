"""`flowgrpo plan`: show what a run will do and cost, whether it fits a GPU, and its seconds on many GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from flowgrpo import config
from flowgrpo.commands.model_kinds import KINDS, load_engines
from flowgrpo.commands.runs.explain import explain_key
from flowgrpo.commands.terminal import out, print_json, print_line
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.distributed import gpu_layout
from flowgrpo.training.planning import gpu_scaling, memory_budget
from flowgrpo.training.planning.gpu_types import find_gpu
from flowgrpo.training.planning.iteration_cost import FIXED
from flowgrpo.training.reports.progress import open_display
from flowgrpo.training.run.phases import phase
from flowgrpo.training.weights import sharding

FIRST = 3.0  # seconds before the first progress line


@dataclass(frozen=True, kw_only=True)
class Machines:
    """GPUs to estimate seconds for: type, number per machine, and the seconds of an iteration that GPUs do not reduce."""

    gpus: int
    gpu_type: str
    of_node: int
    fixed: float


def choose_machines(gpus: int | None, asked: dict[str, Any]) -> Machines | None:
    """Return the machines that the options describe; None if `gpus` is None.

    Raises InputError if another option is invalid, or is given without `gpus`.
    """
    given = {option: value for option, value in asked.items() if value is not None}
    if gpus is None:
        if given:
            raise InputError(f"{next(iter(given))}: it is for --gpus N, say that too")
        return None
    machines = Machines(
        gpus=gpus,
        gpu_type=given.get("--gpu-type", "h100").lower(),
        of_node=given.get("--gpus-per-node", gpu_layout.OF_NODE),
        fixed=given.get("--fixed-seconds", FIXED),
    )
    find_gpu(machines.gpu_type)  # raises for an unknown name
    if not math.isfinite(machines.fixed):
        raise InputError(f"--fixed-seconds: {machines.fixed} is not a number of seconds, take {FIXED:.0f}, say")
    return machines


def load_run_config(folder: Path, overrides: Iterable[str]) -> RunConfig:
    """Return the config of a run at its last checkpoint, with overrides; raise InputError if it cannot be read."""
    settings = config.apply_override(config.of_run(folder).model_dump(), overrides)
    checkpoints = folder / "checkpoints"
    step = checkpoint.choose(checkpoints).step
    if step is None:
        return settings
    rollout = checkpoint.rollout_state(checkpoint.find(checkpoints, step))
    return KINDS[settings.kind].plan.config_at_step(settings, step, rollout)


def show(
    settings: RunConfig, gpu_memory: float | None, machines: Machines | None, form: str, *, full: bool = False
) -> dict[str, Any]:
    """Print and return the plan of a run, whether it fits a GPU of `gpu_memory` GiB, and its seconds on `machines`.

    `full` adds the resolved config, which JSON always has. Raises InputError if the config cannot be run.
    """
    if machines is not None:
        settings = memory_budget.with_setting(settings, "run.processes", machines.gpus)
        gpu_scaling.check_machines(settings, machines.of_node)
    sharding.check(settings)
    kind = KINDS[settings.kind]
    if (engines := load_engines(settings)) is not None:
        engines.check(settings)
    planned = kind.plan.plan(settings)
    if gpu_memory is not None or machines is not None:
        with open_display(first=FIRST), phase("planning"):
            planned |= _measure(settings, planned, gpu_memory, machines)
    if form == "json":
        print_json(planned)
        return planned
    for line in kind.plan.format_tree(planned):
        print_line(f"  {line}")
    table = Table("", "", show_header=False, box=None, padding=(0, 2))
    for label, words in kind.plan.table(planned):
        table.add_row(label, words)
    if settings.train.found:
        keys = " and ".join(f"train.{key}" for key in settings.train.found)
        table.add_row(
            "found",
            f"the run finds {keys} at its start; the plan counts "
            f"{settings.train.most_rows}, the most that one process tries",
        )
    out.print(table)
    for part, lines in (("gpu", memory_budget.lines), ("cost", gpu_scaling.lines)):
        for line in lines(planned[part]) if part in planned else ():
            print_line(line)
    if full:
        out.print()
        out.print(config.dump(settings))
    return planned


def _measure(
    settings: RunConfig, planned: dict[str, Any], gpu_memory: float | None, machines: Machines | None
) -> dict[str, Any]:
    """Return `gpu` (whether the run fits) if `gpu_memory` is given, and `cost` (seconds per iteration) with `machines`."""
    kind, measured = KINDS[settings.kind], {}
    of_node = gpu_layout.OF_NODE if machines is None else machines.of_node
    try:
        with kind.budget.budget_of(settings, of_node) as run:
            if gpu_memory is not None:
                measured["gpu"] = memory_budget.check_fit(run, int(gpu_memory * 2**30))
            if machines is not None:
                prices = gpu_scaling.Prices(gpu_type=machines.gpu_type, fixed=machines.fixed)
                measured["cost"] = gpu_scaling.price_run(run, partial(kind.cost.work, planned=planned), prices)
    except NotImplementedError as error:  # as `training.planning.allocation_counter` raises it
        option = "--gpu-memory" if machines is None else "--gpus"
        raise InputError(f"{option}: {settings.model.path} cannot be planned without its weights: {error}") from error
    return measured


def show_meaning(settings: RunConfig, key: str, form: str) -> None:
    """Print the meaning of a config key; raise InputError for an unknown key, or if `form` is JSON."""
    if form == "json":
        raise InputError("--explain: it is for people, leave --format json out")
    for label, words in explain_key(settings, key):
        print_line(f"{label:28} {words}")
