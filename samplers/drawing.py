"""Noise of siblings: drawn when it is asked for, or by threads while a GPU computes, and sent to the device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from samplers.noise import Address

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

    own: Sequence[tuple[Address, ...]]
    shared: tuple[Address, ...] | None
    strength: float
    scale: float

    def mixed(self, own: np.ndarray, shared: np.ndarray | None) -> np.ndarray:
        """The noise of one, of its own and of what it shares; by NumPy, which starts no threads of its own."""
        if shared is not None:
            own = (shared + self.strength * own) / math.sqrt(1 + self.strength**2)
        return own if self.scale == 1 else own * self.scale


def drawn(families: Sequence[Family], shape: Sequence[int], noise: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The noise (E, ...) of all members of some families.

    Args:
        noise: the source, of a shape and an address.
    """
    found = []
    for family in families:
        shared = None if family.shared is None else noise(shape, *family.shared).numpy()
        found += [torch.from_numpy(family.mixed(noise(shape, *own).numpy(), shared)) for own in family.own]
    return torch.stack(found)


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
        places, parts = iter(whole.numpy()), []
        for family in families:
            shared = None if family.shared is None else _threads().submit(self._noise, shape, *family.shared)
            parts += [_threads().submit(self._put, next(places), family, own, shared) for own in family.own]
        self._begun[name] = whole, parts

    def __call__(self, name: Hashable) -> torch.Tensor:
        """The noise (E, ...) that was begun by a name, once."""
        whole, parts = self._begun.pop(name)
        for part in parts:
            part.result()
        return whole

    def _put(
        self, place: np.ndarray, family: Family, own: tuple[Address, ...], shared: Future[torch.Tensor] | None
    ) -> None:
        """Put the noise of one in its place. What it shares was begun before it, so that it waits for no one behind it."""
        alone = self._noise(place.shape, *own).numpy()
        place[...] = family.mixed(alone, None if shared is None else shared.result().numpy())


@cache
def _threads() -> ThreadPoolExecutor:
    """As many as this process's part of the cores that it may use; launchers tell how many processes share a machine."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ThreadPoolExecutor(max(1, min(cores, MOST_THREADS)), thread_name_prefix="noise")


def sendable(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Room for float32 numbers on the host that `sent` sends to a device as it is: pinned, where that is a GPU."""
    return torch.empty(
        tuple(shape), dtype=torch.float32, pin_memory=device.type == "cuda" and torch.cuda.is_available()
    )


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device. From the host to a GPU it goes by pinned memory, so that the host does not wait for the GPU.

    A copy that waits would keep the host from preparing the next call of the model while the GPU computes this one.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_available():
        tensor = tensor.pin_memory()  # itself, if it is
    return tensor.to(device, non_blocking=device.type != "cpu")
