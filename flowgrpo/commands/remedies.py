"""The override that helps most when memory runs out: from a plan on a GPU, else from a fixed order."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.commands.terminal import say
from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.planning import memory_advice

if TYPE_CHECKING:
    from flowgrpo.training.planning import memory_budget
else:
    memory_budget = lazy("flowgrpo.training.planning.memory_budget")

LOGGER = logging.getLogger(__name__)
PLANNED = {  # phase of a run -> phase of its plan
    "encoding": "encode",
    "calibrating": "rollout",
    "rollout": "rollout",
    "decoding": "decode",
    "rewards": "reward",
    "update": "update",
    "evaluating": "evaluate",
    "checking": "update",
}


def remedy(phase: str | None, settings: RunConfig, prefixes: tuple[str, ...] = ("",)) -> str | None:
    """Return the unset override that saves most memory in a phase, such as `train.micro_batch=4`, or None.

    On a GPU this plans the run on the host, which takes up to a minute. Overrides that start with one of `prefixes` are
    preferred. The phases are the keys of `memory_advice.SWITCHES`.
    """
    plan, first = None, memory_advice.advice(phase, settings, prefixes=prefixes)
    if first is not None and first.startswith("train.replay="):  # a plan cannot tell how many graphs `auto` keeps
        return first
    if torch.cuda.is_available() and phase in PLANNED:
        say(f"out of memory in the {phase} phase; computing which setting helps most")
        plan = _plan_remedy(phase, settings, prefixes)
    return plan or first


def _plan_remedy(phase: str, settings: RunConfig, prefixes: tuple[str, ...]) -> str | None:
    run = settings.run.model_copy(update={"processes": int(os.environ.get("WORLD_SIZE", settings.run.processes))})
    try:
        with KINDS[settings.kind].budget.budget_of(settings.model_copy(update={"run": run})) as memory:
            switch = memory_budget.best_relief(memory, PLANNED[phase], prefixes)
    except Exception as error:  # the run must still end with its own message
        LOGGER.warning("the memory of this run cannot be planned (%s: %s)", type(error).__name__, error)
        return None
    return None if switch is None else memory_budget.as_overrides(dict([switch]))
