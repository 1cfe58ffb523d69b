"""Addressed noise: every random number of a run is a pure function of its address.

An address is a tuple of integers, strings and nested tuples, usually (run seed, phase, iteration, group, path, step).
It is hashed into the key of a counter-based generator (Philox). So an address gives the same bits with any micro-batch
and any number of processes, and before or after a resume. Two different addresses have different streams.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np
import torch

Address = int | str | tuple["Address", ...]


def generator(*address: Address) -> np.random.Generator:
    """Return a fresh generator at `address`; the same address always starts the same stream."""
    return np.random.Generator(np.random.Philox(key=_key(address)))


def _key(address: tuple[Address, ...]) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(repr(address).encode(), digest_size=16).digest(), "<u8")


class _Movable(threading.local):
    """A generator of this thread that goes to any address: a new one takes longer than the numbers of a small picture."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._start, self._generator = self._philox.state, np.random.Generator(self._philox)

    def at(self, address: tuple[Address, ...]) -> np.random.Generator:
        """Return the generator at the start of the stream of `address`, until the next call."""
        self._start["state"]["key"] = _key(address)
        self._philox.state = self._start
        return self._generator


_movable = _Movable()


def uniforms(addresses: Sequence[tuple[Address, ...]], width: int) -> torch.Tensor:
    """Return the first `width` uniforms of `generator` at each of R addresses: float64 (R, width) in [0, 1), on the CPU."""
    numbers = np.empty((len(addresses), width))
    for address, row in zip(addresses, numbers, strict=True):
        _movable.at(address).random(out=row)
    return torch.from_numpy(numbers)


def seed(*address: Address) -> int:
    """Return an integer in [0, 2^63) at `address`, for libraries that need a seed."""
    return int(generator(*address).integers(2**63))


def noise(shape: Sequence[int], *address: Address) -> torch.Tensor:
    """Return standard normal float32 numbers of `shape` on the CPU, at `address`."""
    return torch.from_numpy(_movable.at(address).standard_normal(tuple(shape), dtype=np.float32))
