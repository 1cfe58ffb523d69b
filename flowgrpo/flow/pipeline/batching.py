"""Batches: cut rows for single calls of a pipeline, and join the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop
from samplers.kernels import State


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Abilities of a pipeline, found by running it (see `probe`); the defaults restrict least.

    Attributes:
        pads_prompts: whether rows with prompts of unequal lengths may share a call.
        max_batch: largest number of rows of a call, None for any.
        decodes_by_landing: whether decoding must run the loop's last step, which then returns the given state unchanged.
        starts_alone: whether each row needs its own call to draw its initial state, which would differ in a batch.
        travels: whether steps in one open call have the velocities of single steps, bit for bit.
    """

    pads_prompts: bool = True
    max_batch: int | None = None
    decodes_by_landing: bool = False
    starts_alone: bool = False
    travels: bool = True


def cut(
    walk: DenoisingLoop, capabilities: Capabilities, rows: Sequence[Row], state: State = ()
) -> list[tuple[Sequence[Row], State]]:
    """Cut rows, in order, into batches of neighbours that may share a call; each comes with its part of `state` (B, ...).

    A call has one picture, one negative prompt and so on for all its rows, so these are equal within a batch.
    """
    pads = capabilities.pads_prompts
    kinds = [(walk.conditions_key(row), [shape.batch_key(pads) for shape in walk.encode(row)]) for row in rows]
    cuts = [0]
    for i, (kind, following) in enumerate(pairwise(kinds), start=1):
        if kind != following or i - cuts[-1] == capabilities.max_batch:
            cuts.append(i)
    return [(rows[a:b], tuple(x[a:b] for x in state)) for a, b in pairwise([*cuts, len(rows)])]


def join(states: Sequence[State]) -> State:
    """Concatenate several states (B, ...) to one."""
    return states[0] if len(states) == 1 else tuple(torch.cat(column) for column in zip(*states, strict=True))
