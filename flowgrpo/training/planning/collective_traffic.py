"""Bytes that a process sends in an iteration, where collectives go round a ring, and the seconds that they take.

In a ring of n processes each sends n - 1 of n equal parts to gather them or to scatter their sum, and twice that for a sum
which all get. Other algorithms send other bytes; a sum that stays on the machine is not told from one that crosses.
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

LINK, NETWORK = 0.78, 0.9  # of the peak that collectives reach within a machine and between machines: guesses
PICKLED = 2048  # bytes of what is gathered of a process beside its numbers


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a process sends in one collective.

    Attributes:
        bytes: that it sends.
        crosses: whether its group has processes of several machines.
    """

    bytes: int = 0
    crosses: bool = False

    def seconds(self, gpu: Gpu) -> float:
        """Seconds at the rates of a GPU; a group of several machines goes at the rate of its network."""
        return self.bytes / (1e9 * (NETWORK * gpu.network if self.crosses else LINK * gpu.link))


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The collectives of a run.

    Attributes:
        gather: of all weights in shards that one call of a network needs.
        scatter: of the sum of their gradients, in shards, for one backward pass.
        spread: of the sum of those shards' gradients over the machines that hold the same, for one backward pass.
        step: of the sum of the gradients of what lies whole on each process, for one optimizer step.
    """

    gather: Message
    scatter: Message
    spread: Message
    step: Message


def messages(
    config: RunConfig, networks: Collection[Mapping[str, Shape]], *, width: int, trained: int, layout: Layout
) -> Messages:
    """The collectives of a run.

    Args:
        networks: shapes of the tensors of the networks that are trained or adapted; a call is of one, here the largest.
        width: bytes of a weight that is not quantised.
        trained: how many numbers learn.
    """
    among, full = layout.among, config.model.lora is None
    gather = scatter = spread = step = 0
    if among > 1:
        matrices = width if full and sharding.travels_in_half() else 4
        learning = partial(_learning, matrices=matrices)
        frozen = partial(quantisation.size, width=width, form=config.model.quantise)
        gather = max(_shard(own, among, learning if full else frozen) for own in networks)
    if among > 1 and full:
        scatter = max(_shard(own, among, partial(_learning, matrices=4)) for own in networks)
        spread = _to_all(scatter, layout.replicas)
    else:
        step = _to_all(4 * trained, layout.processes)
    wide, crosses = among > layout.of_node, layout.nodes > 1
    return Messages(
        gather=Message(bytes=(among - 1) * gather, crosses=wide),
        scatter=Message(bytes=(among - 1) * scatter, crosses=wide),
        spread=Message(bytes=spread, crosses=crosses),
        step=Message(bytes=step, crosses=crosses),
    )


def of_rewards(numbers: int, processes: int) -> int:
    """Bytes of the gather of so many numbers, of 8 bytes each, of what the samples of a process are compared by."""
    return (processes - 1) * (PICKLED + 8 * numbers)


def _shard(tensors: Mapping[str, Shape], among: int, size: Callable[[Mapping[str, Shape]], int]) -> int:
    """Bytes of a network on one of those that share it; each tensor is cut along its first dimension, in equal parts."""
    return sum(size({name: (-(-shape[0] // among), *shape[1:])}) for name, shape in tensors.items() if shape)


def _learning(tensors: Mapping[str, Shape], *, matrices: int) -> int:
    """Bytes of weights that learn: matrices, which autocast casts, with so many bytes a number, all else in float32."""
    return sum(math.prod(shape) * (matrices if len(shape) > 1 else 4) for shape in tensors.values())


def _to_all(size: int, processes: int) -> int:
    """Bytes that each of some processes sends where all get the sum of so many bytes."""
    return round(2 * size * (processes - 1) / processes)
