"""Noise of siblings: drawn when it is asked for, or by threads while a GPU computes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from samplers.noise import Address
from samplers.transfer import sendable

MOST_THREADS = 16


@dataclass(frozen=True)
class Family:
    """Where the noise of siblings lies, or that of one who shares none.

    Attributes:
        own: address of each one's.
        shared: that of what all have; None for nothing.
        strength: of their own noise beside what they share.
        scale: factor on the whole.
    """

    own: Sequence[Address]
    shared: Address | None
    strength: float
    scale: float


def drawn(families: Sequence[Family], shape: Sequence[int], noise: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The noise (E, ...) of all members of some families.

    Args:
        noise: the source, of a shape and an address.
    """
    return torch.stack([xi for family in families for xi in _members(family, shape, noise)])


class Ahead:
    """Draws by threads what will be asked for, while the model computes elsewhere; the same numbers as `drawn`.

    A GPU would stand still meanwhile. They are put where a copy to the GPU keeps nobody waiting.

    Args:
        noise: the source, called from several threads at a time; float32.
        device: for which it is drawn.
    """

    def __init__(self, noise: Callable[..., torch.Tensor], device: torch.device):
        self._noise, self._device = noise, device
        self._begun: dict[Hashable, tuple[torch.Tensor, list[Future[None]]]] = {}

    def begin(self, name: Hashable, families: Sequence[Family], shape: Sequence[int]) -> None:
        """Begin to draw the noise of some families, which will be asked for by a name."""
        whole = sendable((sum(len(family.own) for family in families), *shape), self._device)
        parts = zip(families, whole.split([len(family.own) for family in families]), strict=True)
        self._begun[name] = whole, [_threads().submit(_put, family, places, self._noise) for family, places in parts]

    def __call__(self, name: Hashable) -> torch.Tensor:
        """The noise (E, ...) that was begun by a name, once."""
        whole, parts = self._begun.pop(name)
        for part in parts:
            part.result()
        return whole


def _members(family: Family, shape: Sequence[int], noise: Callable[..., torch.Tensor]) -> Iterator[torch.Tensor]:
    shared = None if family.shared is None else noise(shape, *family.shared)
    for address in family.own:
        xi = noise(shape, *address)
        if shared is not None:
            xi = (shared + family.strength * xi) / math.sqrt(1 + family.strength**2)
        yield xi if family.scale == 1 else xi * family.scale


def _put(family: Family, places: torch.Tensor, noise: Callable[..., torch.Tensor]) -> None:
    for place, xi in zip(places, _members(family, places.shape[1:], noise), strict=True):
        place.copy_(xi)


@cache
def _threads() -> ThreadPoolExecutor:
    """As many as this process's part of the cores that it may use; launchers tell how many processes share a machine."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ThreadPoolExecutor(max(1, min(cores, MOST_THREADS)), thread_name_prefix="noise")
