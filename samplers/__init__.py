"""Tensor mathematics of sampling: schedules, kernels, noise, trees, and a scheduler for any diffusers flow pipeline."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samplers.scheduler import FlowSDEScheduler

__all__ = ["FlowSDEScheduler"]


def __getattr__(name: str) -> Any:  # diffusers is imported with the scheduler only
    if name != "FlowSDEScheduler":
        raise AttributeError(f"module 'samplers' has no attribute {name!r}")
    from samplers.scheduler import FlowSDEScheduler

    return FlowSDEScheduler
