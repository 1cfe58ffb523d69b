"""Bytes and seconds of the collectives of an iteration, for ring algorithms.

In a ring of n processes each sends (n - 1) / n of the data for an all-gather or a reduce-scatter, and twice that for an
all-reduce.
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

LINK, NETWORK = 0.78, 0.9  # share of the peak that collectives reach within and between machines: guesses
PICKLED = 2048  # bytes gathered from a process beside its numbers


@dataclass(frozen=True, kw_only=True)
class Message:
    """The part of a collective that one process sends; `crosses` if its group spans several machines."""

    bytes: int = 0
    crosses: bool = False

    def seconds(self, gpu: Gpu) -> float:
        """Return the seconds at a GPU's rates; a group that spans machines runs at the network's rate."""
        return self.bytes / (1e9 * (NETWORK * gpu.network if self.crosses else LINK * gpu.link))


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The collectives of a run."""

    gather: Message  # all-gather of the sharded weights for one call of a network
    scatter: Message  # reduce-scatter of their gradients in one backward pass
    spread: Message  # all-reduce of the shards' gradients over replicas in one backward pass (hsdp)
    step: Message  # all-reduce of unsharded gradients in one optimizer step


def build_messages(
    config: RunConfig, networks: Collection[Mapping[str, Shape]], *, width: int, trained: int, layout: Layout
) -> Messages:
    """Return the collectives of a run, for calls of its largest network; arguments as in `memory_phases.TrialSizes`."""
    among, full = layout.among, config.model.lora is None
    gather = scatter = spread = step = 0
    if among > 1:
        matrices = width if full and sharding.travels_in_half() else 4
        learning = partial(_trained_bytes, matrices=matrices)
        frozen = partial(quantisation.size, width=width, form=config.model.quantise)
        gather = max(_shard_bytes(own, among, learning if full else frozen) for own in networks)
    if among > 1 and full:
        scatter = max(_shard_bytes(own, among, partial(_trained_bytes, matrices=4)) for own in networks)
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
    """Return the bytes that gathering `numbers` float64 numbers of each process sends."""
    return (processes - 1) * (PICKLED + 8 * numbers)


def _shard_bytes(tensors: Mapping[str, Shape], among: int, size: Callable[[Mapping[str, Shape]], int]) -> int:
    """Return the bytes of one shard of a network; each tensor is cut along its first dimension."""
    return sum(size({name: (-(-shape[0] // among), *shape[1:])}) for name, shape in tensors.items() if shape)


def _trained_bytes(tensors: Mapping[str, Shape], *, matrices: int) -> int:
    """Return the bytes of trained weights: `matrices` per number of a matrix, which autocast casts, else float32."""
    return sum(math.prod(shape) * (matrices if len(shape) > 1 else 4) for shape in tensors.values())


def _all_reduce(size: int, processes: int) -> int:
    return round(2 * size * (processes - 1) / processes)
