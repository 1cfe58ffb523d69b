"""Pure tensor mathematics of sampling: schedules, kernels, noise, trees, and a scheduler for any diffusers flow pipeline."""

from samplers.scheduler import FlowSDEScheduler

__all__ = ["FlowSDEScheduler"]
