"""What a run will do and cost, whether it fits a GPU, and its seconds on many, shown before it does it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from flowgrpo import config
from flowgrpo.commands.runs.explain import explained
from flowgrpo.commands.kinds import KINDS, engines_of
from flowgrpo.commands.terminal import out
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.distributed import gpu_layout
from flowgrpo.training.planning import gpu_scaling, memory_budget
from flowgrpo.training.planning.gpu_types import gpu_of
from flowgrpo.training.planning.iteration_cost import FIXED
from flowgrpo.training.weights import sharding


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The GPUs that seconds are asked for.

    Attributes:
        gpus: all of them.
        gpu_type: a name that `training.planning.gpu_types` knows.
        of_node: of a machine.
        fixed: seconds of an iteration that none of them takes away.
    """

    gpus: int
    gpu_type: str
    of_node: int
    fixed: float


def machines(gpus: int | None, asked: dict[str, Any]) -> Machines | None:
    """The machines of the options that a command line has; None without a number of GPUs.

    Args:
        asked: the other options by name, None where they are not given.

    Raises:
        InputError: one of these is given without that number, or it is not known here.
    """
    given = {option: value for option, value in asked.items() if value is not None}
    if gpus is None:
        if given:
            raise InputError(f"{next(iter(given))}: it is for --gpus N, say that too")
        return None
    found = Machines(
        gpus=gpus,
        gpu_type=given.get("--gpu-type", "h100").lower(),
        of_node=given.get("--gpus-per-node", gpu_layout.OF_NODE),
        fixed=given.get("--fixed-seconds", FIXED),
    )
    gpu_of(found.gpu_type)  # refuses a name that is not known
    if not math.isfinite(found.fixed):
        raise InputError(f"--fixed-seconds: {found.fixed} is not a number of seconds, take {FIXED:.0f}, say")
    return found


def of_run(folder: Path, overrides: Iterable[str]) -> RunConfig:
    """The configuration of a run's folder as its last checkpoint left it, with overrides applied.

    Raises:
        InputError: there is no run, or it cannot be read, or the overrides are wrong.
    """
    settings = config.overridden(config.of_run(folder).model_dump(), overrides)
    checkpoints = folder / "checkpoints"
    step = checkpoint.chosen(checkpoints).step
    if step is None:
        return settings
    rollout = checkpoint.rollout_state(checkpoint.find(checkpoints, step))
    return KINDS[settings.kind].plan.reached(settings, step, rollout)


def show(
    settings: RunConfig, gpu_memory: float | None, machines: Machines | None, form: str, *, full: bool = False
) -> None:
    """Show the plan of a run.

    Args:
        gpu_memory: GiB of a GPU that it is to fit; None asks for no such thing.
        machines: on which it is to run; None asks for no seconds.
        form: `human` or `json`.
        full: whether the resolved config follows for people, too; in JSON it always stands.

    Raises:
        InputError: the config cannot be run.
    """
    if machines is not None:
        settings = memory_budget.switched(settings, "run.processes", machines.gpus)
        gpu_scaling.check_machines(settings, machines.of_node)
    sharding.check(settings)
    kind = KINDS[settings.kind]
    if (engines := engines_of(settings)) is not None:
        engines.check(settings)
    planned = kind.plan.plan(settings)
    measured = {} if gpu_memory is None and machines is None else _measured(settings, planned, gpu_memory, machines)
    planned |= measured
    if form == "json":
        print(json.dumps(planned, indent=1))
        return
    for line in kind.plan.drawn(planned):
        out.print(f"  {line}", soft_wrap=True)
    table = Table("", "", show_header=False, box=None, padding=(0, 2))
    for label, words in kind.plan.table(planned):
        table.add_row(label, words)
    if settings.train.found:
        keys = " and ".join(f"train.{key}" for key in settings.train.found)
        table.add_row(
            "found",
            f"{keys}, when the run starts; counted here with {settings.train.most_rows}, the most that one process tries",
        )
    out.print(table)
    for part, lines in (("gpu", memory_budget.lines), ("cost", gpu_scaling.lines)):
        for line in lines(planned[part]) if part in planned else ():
            out.print(line, soft_wrap=True)
    if full:
        out.print()
        out.print(config.dumped(settings))


def _measured(
    settings: RunConfig, planned: dict[str, Any], gpu_memory: float | None, machines: Machines | None
) -> dict[str, Any]:
    """What a trial of the run's calls finds: `gpu`, whether it fits, and `cost`, its seconds, where they are asked for."""
    kind, found = KINDS[settings.kind], {}
    of_node = gpu_layout.OF_NODE if machines is None else machines.of_node
    try:
        with kind.budget.budget_of(settings, of_node) as run:
            if gpu_memory is not None:
                found["gpu"] = memory_budget.fitted(run, int(gpu_memory * 2**30), memory_budget.rewards_of(settings)[1])
            if machines is not None:
                prices = gpu_scaling.Prices(gpu_type=machines.gpu_type, fixed=machines.fixed)
                found["cost"] = gpu_scaling.priced(run, partial(kind.cost.work, planned=planned), prices)
    except NotImplementedError as error:  # as `training.planning.allocation_counter` raises it
        option = "--gpu-memory" if machines is None else "--gpus"
        raise InputError(f"{option}: {settings.model.path} cannot be planned without its weights: {error}") from error
    return found


def show_meaning(settings: RunConfig, key: str, form: str) -> None:
    """Show what a key of the config means.

    Raises:
        InputError: there is no such key, or JSON is asked for.
    """
    if form == "json":
        raise InputError("--explain: it is for people, leave --format json out")
    for label, words in explained(settings, key):
        out.print(f"{label:28} {words}", soft_wrap=True)
