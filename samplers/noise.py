"""Addressed noise: every random number of a run is a pure function of where it is used.

An address is a tuple of integers, strings and nested tuples, usually (run seed, phase, iteration, group, path, step).
It is hashed into the key of a counter-based generator (Philox), so the same address gives the same bits for any
micro-batch, any number of processes, and before or after a resume; and no two addresses share a stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from typing_extensions import override

Address = int | str | tuple["Address", ...]


class _Key(ISeedSequence):
    """Gives Philox its key of 16 bytes; by `Philox(key=...)` it would first ask the system for a seed that it drops."""

    def __init__(self, key: bytes):
        self.key = key

    @override
    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.frombuffer(self.key, "<u8")


def generator(*address: Address) -> np.random.Generator:
    """A fresh generator at `address`; the same address always starts the same stream."""
    return np.random.Generator(_philox(address))


def _philox(address: tuple[Address, ...]) -> np.random.Philox:
    return np.random.Philox(_Key(_key(address)))  # type: ignore[arg-type]  # numpy's stubs take no ISeedSequence


def _key(address: tuple[Address, ...]) -> bytes:
    return hashlib.blake2b(repr(address).encode(), digest_size=16).digest()


def uniforms(addresses: Sequence[tuple[Address, ...]], width: int) -> torch.Tensor:
    """Numbers (R, width) float64 in [0, 1) on the CPU: a row holds the first ones that `generator` draws at its address.

    One generator goes from address to address, which takes less time than as many generators.
    """
    found = np.empty((len(addresses), width))
    if not len(addresses):
        return torch.from_numpy(found)
    philox = _philox(addresses[0])
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
