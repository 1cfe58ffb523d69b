"""Pipelines that start from a noised picture and so skip the first steps of their schedule, by the argument `strength`.

Their own method `get_timesteps` drops the first steps of the scheduler's table. Here it always gets the whole table, even
if only a slice runs; the slice's step indices then count from the first remaining step.
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
    """Let a pipeline's `get_timesteps`, if any, cut the scheduler's whole table; it raises InputError if no step remains."""
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
