"""What to set when memory ran out: on a GPU what the plan says spares most there, else the first of a fixed order."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from flowgrpo.commands.kinds import KINDS
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
PLANNED = {  # phases of a run -> those of its plan
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
    """The override that helps most in a phase and is not set yet, as `train.micro_batch=4`; None if nobody knows one.

    A plan takes up to a minute, on the host, and is of a GPU's memory; where there is none, or the plan knows nothing that
    helps, `memory_advice.advice` has a word.

    Args:
        phase: where memory ran out, a key of `memory_advice.SWITCHES`.
        prefixes: of overrides to choose from; where none of them is left, from all.
    """
    planned, first = None, memory_advice.advice(phase, settings, prefixes=prefixes)
    if first is not None and first.startswith("train.replay="):  # a plan does not know what `auto` kept
        return first
    if torch.cuda.is_available() and phase in PLANNED:
        say(f"out of memory in the {phase} phase; planning on the host what helps most there")
        planned = _planned(phase, settings, prefixes)
    return planned or first


def _planned(phase: str, settings: RunConfig, prefixes: tuple[str, ...]) -> str | None:
    run = settings.run.model_copy(update={"processes": int(os.environ.get("WORLD_SIZE", settings.run.processes))})
    try:
        with KINDS[settings.kind].budget.budget_of(settings.model_copy(update={"run": run})) as memory:
            found = memory_budget.relief(memory, PLANNED[phase], prefixes)
    except Exception as error:  # whatever it is, the run must end with its own reason and its command
        LOGGER.warning("the memory of this run cannot be planned (%s: %s)", type(error).__name__, error)
        return None
    return None if found is None else memory_budget.written(dict([found]))
