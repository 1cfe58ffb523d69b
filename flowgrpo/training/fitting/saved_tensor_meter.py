"""Bytes that graphs keep for their backward passes: the part of an update's memory that its plan decides, on any device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

Tensor = torch.Tensor


class _Held:
    """A saved tensor, counted for as long as its graph lives."""

    def __init__(self, tensor: Tensor, meter: SavedTensorMeter):
        self.tensor, self.meter = tensor, meter
        meter.add(tensor)

    def __del__(self):
        self.meter.remove(self.tensor)


class SavedTensorMeter(torch.autograd.graph.saved_tensors_hooks):
    """A context that counts what graphs made in it keep, each storage once, but for the weights.

    Attributes:
        now: bytes at present.
        peak: the most at once.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self.now = self.peak = 0
        self.users: Counter[int] = Counter()
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        super().__init__(lambda tensor: _Held(tensor, self), lambda held: held.tensor)

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
        """Forget a tensor whose graph is gone."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.users[storage.data_ptr()] -= 1
            self.now -= storage.nbytes() * (self.users[storage.data_ptr()] == 0)
