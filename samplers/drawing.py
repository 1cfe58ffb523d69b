"""Draw the noise of sibling edges, on request or ahead in CPU threads while a GPU computes; copy tensors to a device."""

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
    """Noise addresses of siblings: `own` has one for each, `shared` is common to all (None: no common noise)."""

    own: Sequence[tuple[Address, ...]]
    shared: tuple[Address, ...] | None
    strength: float
    scale: float

    def mixed(self, own: np.ndarray, shared: np.ndarray | None) -> np.ndarray:
        """Return one sibling's noise from its own and the shared noise; NumPy computes it in the calling thread alone."""
        if shared is not None:
            own = (shared + self.strength * own) / math.sqrt(1 + self.strength**2)
        return own if self.scale == 1 else own * self.scale


def draw(families: Sequence[Family], shape: Sequence[int], noise: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the noise (E, ...) of all E members of `families`, from a source `noise(shape, *address)`."""
    whole = np.empty((sum(len(family.own) for family in families), *shape), np.float32)
    places = iter(whole)
    for family in families:
        shared = None if family.shared is None else noise(shape, *family.shared).numpy()
        for own in family.own:
            next(places)[...] = family.mixed(noise(shape, *own).numpy(), shared)
    return torch.from_numpy(whole)


class Ahead:
    """Threads that draw float32 noise ahead, while the model computes on a GPU. The noise equals that of `draw`."""

    def __init__(self, noise: Callable[..., torch.Tensor], device: torch.device):
        self._noise, self._device = noise, device
        self._begun: dict[Hashable, tuple[torch.Tensor, list[Future[None]]]] = {}

    def begin(self, name: Hashable, families: Sequence[Family], shape: Sequence[int]) -> None:
        """Begin to draw the noise of `families`, to be fetched under `name`."""
        whole = sendable((sum(len(family.own) for family in families), *shape), self._device)
        places, parts = iter(whole.numpy()), []
        for family in families:
            shared = None if family.shared is None else _threads().submit(self._noise, shape, *family.shared)
            parts += [_threads().submit(self._put, next(places), family, own, shared) for own in family.own]
        self._begun[name] = whole, parts

    def __call__(self, name: Hashable) -> torch.Tensor:
        """Wait for the noise (E, ...) begun under `name` and return it; each name can be fetched once."""
        whole, parts = self._begun.pop(name)
        for part in parts:
            part.result()
        return whole

    def _put(
        self, place: np.ndarray, family: Family, own: tuple[Address, ...], shared: Future[torch.Tensor] | None
    ) -> None:
        """Write one sibling's noise. Waiting for the shared noise cannot deadlock, because it was submitted earlier."""
        alone = self._noise(place.shape, *own).numpy()
        place[...] = family.mixed(alone, None if shared is None else shared.result().numpy())


@cache
def _threads() -> ThreadPoolExecutor:
    """Return a pool of one thread for each of this process's cores: the usable cores / LOCAL_WORLD_SIZE."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ThreadPoolExecutor(max(1, min(cores, MOST_THREADS)), thread_name_prefix="noise")


def sendable(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return an uninitialised float32 CPU tensor, pinned if `device` is a GPU."""
    return torch.empty(
        tuple(shape), dtype=torch.float32, pin_memory=device.type == "cuda" and torch.cuda.is_available()
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`; to a GPU it goes through pinned memory, so the CPU does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_available():
        tensor = tensor.pin_memory()  # returns the tensor itself if it is pinned
    return tensor.to(device, non_blocking=device.type != "cpu")
