"""Meter of the bytes that autograd graphs save for their backward passes, on any device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

Tensor = torch.Tensor


class _SavedTensor:
    """A saved tensor that the meter counts as long as its graph lives."""

    def __init__(self, tensor: Tensor, meter: SavedTensorMeter):
        self.tensor, self.meter = tensor, meter
        meter.add(tensor)

    def __del__(self):
        self.meter.remove(self.tensor)


class SavedTensorMeter(torch.autograd.graph.saved_tensors_hooks):
    """A context that counts the bytes saved by autograd graphs built in it: `now` and at the `peak`, without weights."""

    def __init__(self, weights: Iterable[Tensor]):
        self.now = self.peak = 0
        self.users: Counter[int] = Counter()
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        super().__init__(lambda tensor: _SavedTensor(tensor, self), lambda saved: saved.tensor)

    def __enter__(self) -> SavedTensorMeter:  # type: ignore[override]  # torch's returns nothing
        super().__enter__()
        return self

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that a graph saves."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.now += storage.nbytes() * (self.users[storage.data_ptr()] == 0)
            self.users[storage.data_ptr()] += 1
            self.peak = max(self.peak, self.now)

    def remove(self, tensor: Tensor) -> None:
        """Stop counting a tensor whose graph has been freed."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.users[storage.data_ptr()] -= 1
            self.now -= storage.nbytes() * (self.users[storage.data_ptr()] == 0)
