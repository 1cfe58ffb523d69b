"""State of the global random generators of torch, numpy and Python. Only plug-ins use these generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of the global generators, in types that `torch.load` reads with `weights_only=True`."""
    name, keys, *rest = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a result of `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the state of the global generators at exit."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def fixed_seed(devices: Sequence[int] = ()) -> Iterator[None]:
    """Seed torch's global generators, of the CPU and the given CUDA devices, with 0; restore their state at exit."""
    with torch.random.fork_rng(devices, device_type="cuda"):
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(0)
        yield
