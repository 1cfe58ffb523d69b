"""Bytes and seconds of the collectives of an iteration, for ring algorithms.

In a ring of n processes, each process sends (n - 1) / n of the data for an all-gather or a reduce-scatter, and twice as
much for an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed.gpu_layout import Layout
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.planning.gpu_types import Gpu
from flowgrpo.training.weights import quantisation, sharding

LINK, NETWORK = 0.78, 0.9  # fraction of the peak rate that collectives reach within and between machines: guesses
PICKLED = 2048  # bytes that each process sends in addition to its numbers


@dataclass(frozen=True, kw_only=True)
class Message:
    """The part of a collective that one process sends."""

    bytes: int = 0
    crosses: bool = False  # whether the collective's group spans several machines

    def seconds(self, gpu: Gpu) -> float:
        """Return the seconds of the message, over the network if it crosses machines, else over GPU links."""
        return self.bytes / (1e9 * (NETWORK * gpu.network if self.crosses else LINK * gpu.link))


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The collectives of a run."""

    gather: Message  # all-gather of sharded weights, for one call of a network
    scatter: Message  # reduce-scatter of gradients of sharded weights, in one backward pass
    spread: Message  # all-reduce of gradients over replicas of a shard, in one backward pass (hsdp)
    step: Message  # all-reduce of gradients of unsharded weights, in one optimizer step


def build_messages(
    config: RunConfig, networks: Collection[Mapping[str, Shape]], *, width: int, trained: int, layout: Layout
) -> Messages:
    """Return the collectives of a run, for calls of its largest network; `width`, `trained`: see `TrialSizes`.

    `networks` are the shapes of the tensors of each trained or adapted network.
    """
    among, full = layout.among, config.model.lora is None
    gather = scatter = spread = step = 0
    if among > 1:
        matrices = width if full and sharding.travels_in_half() else 4
        learning = partial(_trained_bytes, matrices=matrices)
        frozen = partial(quantisation.size, width=width, form=config.model.quantise)
        gather = max(_shard_bytes(shapes, among, learning if full else frozen) for shapes in networks)
    if among > 1 and full:
        scatter = max(_shard_bytes(shapes, among, partial(_trained_bytes, matrices=4)) for shapes in networks)
        spread = _all_reduce(scatter, layout.replicas)
    else:
        step = _all_reduce(4 * trained, layout.processes)
    wide, crosses = among > layout.of_node, layout.nodes > 1
    return Messages(
        gather=Message(bytes=(among - 1) * gather, crosses=wide),
        scatter=Message(bytes=(among - 1) * scatter, crosses=wide),
        spread=Message(bytes=spread, crosses=crosses),
        step=Message(bytes=step, crosses=crosses),
    )


def reward_bytes(numbers: int, processes: int) -> int:
    """Return the bytes that one process sends to gather `numbers` float64 numbers of each process."""
    return (processes - 1) * (PICKLED + 8 * numbers)


def _shard_bytes(tensors: Mapping[str, Shape], among: int, size: Callable[[Mapping[str, Shape]], int]) -> int:
    """Return the bytes of one shard of a network, whose tensors are cut along the first dimension."""
    return sum(size({name: (-(-shape[0] // among), *shape[1:])}) for name, shape in tensors.items() if shape)


def _trained_bytes(tensors: Mapping[str, Shape], *, matrices: int) -> int:
    """Return the bytes of trained weights: `matrices` bytes per element of a matrix (autocast casts only these), else 4."""
    return sum(math.prod(shape) * (matrices if len(shape) > 1 else 4) for shape in tensors.values())


def _all_reduce(size: int, processes: int) -> int:
    return round(2 * size * (processes - 1) / processes)
