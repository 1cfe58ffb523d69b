"""Addressed noise: every random number of a run is a pure function of where it is used.

An address is a tuple of integers, strings and nested tuples, usually (run seed, phase, iteration, group, path, step).
It is hashed into the key of a counter-based generator (Philox), so the same address gives the same bits for any
micro-batch, any number of processes, and before or after a resume; and no two addresses share a stream.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from typing_extensions import override

MOST_THREADS = 16  # that draw ahead

Address = int | str | tuple["Address", ...]


class _Key(ISeedSequence):
    """Gives Philox its key of 16 bytes; by `Philox(key=...)` it would first ask the system for a seed that it drops."""

    def __init__(self, key: bytes):
        self.key = key

    @override
    def generate_state(self, n_words: int, dtype: type = np.uint64) -> np.ndarray:
        return np.frombuffer(self.key, "<u8")


def generator(*address: Address) -> np.random.Generator:
    """A fresh generator at `address`; the same address always starts the same stream."""
    return np.random.Generator(np.random.Philox(_Key(_key(address))))


def _key(address: Address) -> bytes:
    return hashlib.blake2b(repr(address).encode(), digest_size=16).digest()


def uniforms(addresses: Sequence[Address], width: int) -> torch.Tensor:
    """Numbers (R, width) float64 in [0, 1) on the CPU: a row holds the first ones that `generator` draws at its address.

    One generator goes from address to address, which takes a third of the time that as many would.
    """
    found = np.empty((len(addresses), width))
    if not len(addresses):
        return torch.from_numpy(found)
    philox = np.random.Philox(_Key(_key(addresses[0])))
    started, drawing = philox.state, np.random.Generator(philox)
    for address, row in zip(addresses, found, strict=True):
        started["state"]["key"] = np.frombuffer(_key(address), "<u8")
        philox.state = started
        drawing.random(out=row)
    return torch.from_numpy(found)


def seed(*address: Address) -> int:
    """An integer in [0, 2^63) at `address`, for libraries that want a seed of their own."""
    return int(generator(*address).integers(2**63))


def noise(shape: Sequence[int], *address: Address) -> torch.Tensor:
    """Standard normal float32 on the CPU, of `shape`, at `address`."""
    return torch.from_numpy(generator(*address).standard_normal(tuple(shape), dtype=np.float32))


class Ahead:
    """A source of noise that draws in threads what it will be asked for, while the model computes elsewhere.

    A GPU would stand still meanwhile. The numbers are the same.

    Args:
        noise: the source, called from several threads at a time.
    """

    def __init__(self, noise: Callable[..., torch.Tensor]):
        self._noise = noise
        self._begun: dict[Address, Future[torch.Tensor]] = {}

    def begin(self, noises: Iterable[tuple[Sequence[int], tuple[Address, ...]]]) -> None:
        """Begin to draw what lies at some addresses, each with its shape."""
        for shape, address in noises:
            if address not in self._begun:
                self._begun[address] = _threads().submit(self._noise, shape, *address)

    def __call__(self, shape: Sequence[int], *address: Address) -> torch.Tensor:
        """What the source has at an address; drawn now if it was not begun, and again if it is asked for twice."""
        begun = self._begun.pop(address, None)
        return self._noise(shape, *address) if begun is None else begun.result()


@cache
def _threads() -> ThreadPoolExecutor:
    """As many as this process's part of the cores that it may use; launchers tell how many processes share a machine."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ThreadPoolExecutor(max(1, min(cores, MOST_THREADS)), thread_name_prefix="noise")
