"""Kept autograd graphs: the rollout keeps those of its trained evaluations, and the first update reuses them.

Before the first optimizer step of an iteration, the model calls of a replay would repeat the rollout's, with ratios of
1. With kept graphs (`samplers.trees.Evaluation.velocity`) the update skips these calls. It only sends the loss
backward, one evaluation with all its edges at a time. Gradients equal those of a replay bit for bit. Later updates of
the iteration have other weights, and replay.

A rollout keeps the graphs of the first trained steps, as many as there is room for. The update takes evaluations in the
same order, so it has released these graphs before it replays the rest.
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

ROOM = 0.5  # fraction of the free memory that graphs may take
ADDED = 0.5  # and, of host memory, their fraction of what the process takes without them
HELD = 2  # bytes of host memory for each byte of graphs with adapters; measured 1.9, and without adapters 1.05


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that a call's graph keeps until its backward pass: `once` per call (weight casts), plus `each` per row."""

    once: int
    each: int

    def of(self, rows: Sequence[int], *, size: int) -> int:
        """Return the bytes of the graphs of `rows` at each step, in calls of at most `size` rows."""
        return sum(math.ceil(count / size) * self.once + count * self.each for count in rows)

    def within(self, room: float, rows: Sequence[int], *, size: int) -> int:
        """Return the number of steps, from the first, whose graphs take at most `room` bytes; else as `of`."""
        return max(steps for steps in range(len(rows) + 1) if not steps or self.of(rows[:steps], size=size) <= room)


def in_host_memory(kept: Kept, *, adapters: bool) -> Kept:
    """Return what graphs take of a host's memory: with adapters also the blocks that frozen layers free among them.

    Those stay with the process; see `rewards.memory.keep_freed_memory`.
    """
    return Kept(once=HELD * kept.once, each=HELD * kept.each) if adapters else kept


def drop(evaluations: Sequence[Evaluation]) -> None:
    """Release the graphs of `evaluations`."""
    for evaluation in evaluations:
        evaluation.velocity = None


def measure_graph(policy: Policy, state: State, row: Row, *, size: int) -> tuple[Kept, int]:
    """Run one model call on one row; return its graph's memory, and the peak bytes beside the graph of a `size`-row call.

    The memory of the weights does not count. With several networks, each with its own range of sigmas, both results are
    maxima over the first and the last step.
    """
    steps = [policy.sigmas[0]] if len(policy.modules) == 1 else [policy.sigmas[0], policy.sigmas[-2]]
    before = policy.evaluations
    parts = [_measure(policy, state, row, sigma=sigma, size=size) for sigma in steps]
    policy.evaluations = before
    once, each, workspace = map(max, zip(*parts, strict=True))
    return Kept(once=once, each=each), workspace


def _measure(policy: Policy, state: State, row: Row, *, sigma: float, size: int) -> tuple[int, int, int]:
    with torch.enable_grad(), allocation_counter.AllocationCounter() as counted:
        for network in policy.modules.values():
            for tensor in (*network.parameters(), *network.buffers()):
                counted.ignore(tensor)
        counted.restart()
        velocity = policy.velocity(state, sigma, [row])
        once, each = counted.parts
        del velocity
    return once, each, counted.peaks.of(size) - once - size * each
