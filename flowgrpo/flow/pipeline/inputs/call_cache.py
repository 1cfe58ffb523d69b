"""A cache of tensors on their device, which a pipeline needs in each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from flowgrpo.data.tensor_maps import map_tensors

# Bytes. A call with larger tensors takes so long that computing them again costs little.
KEPT = 64 * 2**20


class CallCache:
    """A cache of results on their device, up to `KEPT` bytes in total; the least recently used are dropped."""

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[Any, int]] = {}  # results and their bytes, oldest first

    def of(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of a key, computed by `make` if needed; the caller must not change it."""
        entry = self._results.pop(key, None)
        if entry is None:
            result = make()
            entry = result, tensor_bytes(result)
        if entry[1] <= KEPT:
            self._results[key] = entry
            while sum(size for _, size in self._results.values()) > KEPT:
                del self._results[next(iter(self._results))]
        return entry[0]


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors of a nested value."""
    sizes: list[int] = []

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(counted, value)
    return sum(sizes)
