"""Graphs that a rollout keeps of its own evaluations, so that the first update of an iteration calls no network for them.

Until the first optimizer step of an iteration the weights are those that rolled out: the calls of that update would be the
rollout's own once more, and their ratios 1. Where the rollout keeps the graphs of the evaluations that it trains on
(`samplers.trees.Evaluation.velocity`), the update only sends the loss backward through them, one evaluation with all the
edges that leave it; gradients are those of a replay to the bit. Later updates of the iteration stand on other weights, and
replay as ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.data.prompts import Row
    from flowgrpo.flow.pipeline.policy import Policy
    from flowgrpo.training.planning import allocation_counter
    from samplers.kernels import State
    from samplers.trees import Evaluation
else:
    allocation_counter = lazy("flowgrpo.training.planning.allocation_counter")

ROOM = 0.5  # of the memory that is free, which graphs may take


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the graph of a call of the model keeps until its backward pass, in bytes.

    Attributes:
        once: for any number of rows, such as copies of trained weights in half precision.
        each: for each row.
    """

    once: int
    each: int

    def of(self, rows: int, *, times: int, size: int) -> int:
        """Bytes of the graphs of so many rows, which lie at some times of the schedule, in calls of a size."""
        calls = times * math.ceil(rows / (times * size)) if rows else 0
        return calls * self.once + rows * self.each


def drop(evaluations: Sequence[Evaluation]) -> None:
    """Let go of the graphs of some evaluations."""
    for evaluation in evaluations:
        evaluation.velocity = None


def measured(policy: Policy, state: State, row: Row, *, size: int) -> tuple[Kept, int]:
    """What the graph of a velocity keeps beside the weights, and bytes that a call of a size takes beside it, by a run.

    Of several networks, which have sigmas of their own, the larger of the first step's and the last one's.

    Args:
        state: of one row.
        size: rows of a call.
    """
    steps = [policy.sigmas[0]] if len(policy.modules) == 1 else [policy.sigmas[0], policy.sigmas[-2]]
    before = policy.evaluations
    parts = [_measured(policy, state, row, sigma=sigma, size=size) for sigma in steps]
    policy.evaluations = before
    once, each, beside = map(max, zip(*parts, strict=True))
    return Kept(once=once, each=each), beside


def _measured(policy: Policy, state: State, row: Row, *, sigma: float, size: int) -> tuple[int, int, int]:
    with torch.enable_grad(), allocation_counter.AllocationCounter() as counted:
        for network in policy.modules.values():
            for tensor in (*network.parameters(), *network.buffers()):
                counted.ignore(tensor)
        counted.restart()
        velocity = policy.velocity(state, sigma, [row])
        once, each = counted.parts
        del velocity
    return once, each, counted.peaks.of(size) - once - size * each
