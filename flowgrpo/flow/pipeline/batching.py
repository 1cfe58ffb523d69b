"""Cutting rows into batches that one call of a pipeline can take, and joining what the calls return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop
from samplers.kernels import State


@dataclass(frozen=True)
class Capabilities:
    """What a pipeline can do, found by running it (see `probe`); the defaults are the most that one can.

    Attributes:
        pads_prompts: whether rows whose prompts have unequal lengths may share a call.
        max_batch: most rows of a call, None for any number.
        decodes_by_landing: whether decoding needs a last step of the loop, which lands on the state.
        starts_alone: whether each row needs a call of its own to start, as together they draw other numbers than alone.
    """

    pads_prompts: bool = True
    max_batch: int | None = None
    decodes_by_landing: bool = False
    starts_alone: bool = False


def cut(
    walk: DenoisingLoop, capabilities: Capabilities, rows: Sequence[Row], state: State = ()
) -> list[tuple[Sequence[Row], State]]:
    """Neighbouring rows that one call can take, in their order, each batch with its part of the state (B, ...).

    One call has one picture, one negative prompt, ... for all its rows, so these must be equal in a batch.
    """
    pads = capabilities.pads_prompts
    kinds = [(walk.conditions_key(row), [shape.batch_key(pads) for shape in walk.encode(row)]) for row in rows]
    cuts = [0]
    for i, (kind, following) in enumerate(pairwise(kinds), start=1):
        if kind != following or i - cuts[-1] == capabilities.max_batch:
            cuts.append(i)
    return [(rows[a:b], tuple(x[a:b] for x in state)) for a, b in pairwise([*cuts, len(rows)])]


def join(states: Sequence[State]) -> State:
    """The rows of several states (B, ...) as one state."""
    return states[0] if len(states) == 1 else tuple(torch.cat(column) for column in zip(*states, strict=True))
