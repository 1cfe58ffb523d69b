"""Pipelines that cut their schedule by a `strength`, because they begin from a noised picture and not from noise.

Such a pipeline cuts the scheduler's table in a `get_timesteps` of its own. That method runs as ever, on the whole table; a
slice of the schedule then counts from where the pipeline begins.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flowgrpo.errors import InputError
from samplers.scheduler import FlowSDEScheduler


def follow(pipe: DiffusionPipeline, scheduler: FlowSDEScheduler) -> None:
    """Have the pipeline's `get_timesteps` cut the whole table of `scheduler`; do nothing where it has none.

    A call then raises an InputError where the cut leaves no step.
    """
    method = getattr(pipe, "get_timesteps", None)
    if method is None or not {"num_inference_steps", "strength"} <= set(inspect.signature(method).parameters):
        return
    signature = inspect.signature(method)

    @functools.wraps(method)
    def get_timesteps(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
        given = signature.bind(*args, **kwargs)

        def cut(timesteps: torch.Tensor) -> torch.Tensor:
            given.arguments["num_inference_steps"] = len(timesteps)
            if "timesteps" in given.arguments:
                given.arguments["timesteps"] = timesteps
            return method(*given.args, **given.kwargs)[0]

        kept = scheduler.recut(cut)
        if not len(kept):
            raise InputError(
                f"model.call.strength: {given.arguments['strength']} leaves {type(pipe).__name__} no step, raise it or "
                "num_inference_steps"
            )
        return kept, len(kept)

    pipe.get_timesteps = get_timesteps
