"""Pipelines whose loop pins a part of the state, as inpainting pins the unmasked part of a picture.

After each step such a loop overwrites that part with the picture, noised for the next step. Here the state of a trajectory
is the scheduler's own result, before it is overwritten. So a step from a state starts one step earlier: that step returns
the state (it "lands" on it), the loop overwrites the pinned part, and the model sees the outcome.

The velocity of the pinned part is 0, so that part changes no ratio, divergence or gradient. It still counts in a
log-probability's mean over elements: a mask that frees a tenth of a picture scales its log-ratios by a tenth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flowgrpo.data.prompts import Row
from samplers.scheduler import StepRecord

LEAST = 0.1  # standard deviations: larger than rounding errors, smaller than the change by a mask


class Watch:
    """A `callback_on_step_end` for a pipeline, which records the latents that the loop continues with."""

    latents: torch.Tensor | None = None

    def __call__(self, pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        """Keep the latents and change nothing."""
        self.latents = values.get("latents")
        return {}

    def sees_pins(self, step: StepRecord) -> bool:
        """Return whether the loop continues with other latents than the step's result."""
        moved = step.next_sample.float()
        if self.latents is None or self.latents.shape != moved.shape:
            return False
        return bool((self.latents.float() - moved).abs().max() > LEAST * moved.std())

    def free(self, step: StepRecord) -> torch.Tensor:
        """Return the velocity of a step, 0 where the loop pinned its result."""
        moved = step.next_sample
        return torch.where((self.latents != moved) & moved.isfinite(), 0, step.velocity)

    def frees(self, step: StepRecord) -> bool:
        """Return whether the loop leaves any part of the step's result unchanged."""
        return self.latents is not None and bool((self.latents == step.next_sample).any())


def whole(row: Row) -> str:
    """Return the message about a row whose whole state is pinned."""
    return (
        f"prompts: the mask of {row.prompt!r} leaves nothing to paint, so nothing is learnt from it: the whole picture is "
        "put back after each step; a mask is white where the picture is painted anew"
    )


def spare(module: torch.nn.Module, landing: Callable[[], bool]) -> None:
    """While `landing()`, let a module repeat an earlier result for inputs of equal shapes; the result is not used then."""
    forward, answers = module.forward, {}

    @functools.wraps(forward)
    def answer(*args: Any, **kwargs: Any) -> Any:
        if not landing():
            return forward(*args, **kwargs)
        shapes = tuple(x.shape for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        if shapes not in answers:
            with torch.no_grad():
                answers[shapes] = forward(*args, **kwargs)
        return answers[shapes]

    module.forward = answer
