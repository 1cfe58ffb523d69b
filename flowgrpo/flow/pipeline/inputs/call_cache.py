"""What a pipeline asks for in each of its calls, kept from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from flowgrpo.data.tensor_maps import map_tensors

# Bytes of tensors. With larger ones a step takes so long that making them anew is nothing.
KEPT = 64 * 2**20


class CallCache:
    """The results that were asked for last, on their device, of `KEPT` bytes at most; none that is larger by itself."""

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[Any, int]] = {}  # and their bytes

    def of(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A copy of a key's result, which is made where it is not there: pipelines may write into what they are given."""
        found = self._results.pop(key, None) or _with_size(make())
        if found[1] <= KEPT:
            self._results[key] = found  # the last that will be dropped
            while sum(size for _, size in self._results.values()) > KEPT:
                del self._results[next(iter(self._results))]
        return map_tensors(torch.clone, found[0])


def _with_size(result: Any) -> tuple[Any, int]:
    sizes: list[int] = []

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(counted, result)
    return result, sum(sizes)
