"""Pipelines whose loop pins a part of the state, as painting in a masked part of a picture does with the rest of it.

After each step such a loop puts something of its own, the picture at the noise of the next step, in place of a part of what
the scheduler moved to. What the scheduler moved to stays the state of a trajectory. A step from it begins with a landing on
it one step before, so the model sees what the loop makes of it; and the velocity of the pinned part, which moves to what
nobody will see, is 0, so that part has no say in a ratio, a divergence or a gradient. It counts in the mean over elements
that a log-probability is: a mask that frees a tenth of a picture scales its log-ratios by a tenth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flowgrpo.data.prompts import Row
from samplers.scheduler import StepRecord

LEAST = 0.1  # of a standard deviation: more than any rounding, less than what a mask puts in place


class Watch:
    """A pipeline's `callback_on_step_end` that keeps the latents which its loop goes on with."""

    latents: torch.Tensor | None = None

    def __call__(self, pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        """Keep the latents and change nothing."""
        self.latents = values.get("latents")
        return {}

    def sees_pins(self, step: StepRecord) -> bool:
        """Whether the loop goes on with something else than what a step moved to."""
        moved = step.next_sample.float()
        if self.latents is None or self.latents.shape != moved.shape:
            return False
        return bool((self.latents.float() - moved).abs().max() > LEAST * moved.std())

    def free(self, step: StepRecord) -> torch.Tensor:
        """The velocity of a step, 0 where its loop pinned what it moved to."""
        moved = step.next_sample
        return torch.where((self.latents != moved) & moved.isfinite(), 0, step.velocity)

    def frees(self, step: StepRecord) -> bool:
        """Whether the loop leaves any part of what a step moved to as it is: what is pinned whole learns nothing."""
        return self.latents is not None and bool((self.latents == step.next_sample).any())


def whole(row: Row) -> str:
    """What is wrong with a row of which everything is pinned."""
    return (
        f"prompts: the mask of {row.prompt!r} leaves nothing to paint, so nothing is learnt from it: the whole picture is "
        "put back after each step; a mask is white where the picture is painted anew"
    )


def spare(module: torch.nn.Module, landing: Callable[[], bool]) -> None:
    """Let a module answer, while `landing()`, what it once answered to inputs of the same shapes: nobody reads it."""
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
