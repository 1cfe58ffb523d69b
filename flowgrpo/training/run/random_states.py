"""State of the global random generators of torch, numpy and Python, which only plug-ins use."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of the global generators of torch, numpy and Python, in types that load as plain data."""
    name, keys, *rest = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the global generators at exit."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def seeded(devices: Sequence[int] = ()) -> Iterator[None]:
    """Seed torch's global generators (CPU and given CUDA devices) with 0, and restore them at exit."""
    with torch.random.fork_rng(devices, device_type="cuda"):
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(0)
        yield
