"""Counts what operations allocate, in bytes that any number of rows needs once or that each row needs, and compute."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Tensor = torch.Tensor
# What networks ask of numbers that do not exist, as zeros would answer: whether all are nothing, whether any is broken.
ANSWERED = {torch.ops.aten.all.default: True, torch.ops.aten.any.default: False}
# Products of two tensors that are no weights sum over the rows: they are gradients of weights.
SUMS = (torch.ops.aten.mm.default, torch.ops.aten.embedding_dense_backward.default)


def _experts(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Operations of rows (T, K) times one matrix each of (E, K, N), as a layer of experts multiplies them."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention(queries: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> int:
    """Operations of attention, (B, heads, tokens, width) each; heads may share keys and values."""
    return 2 * queries.shape[:-1].numel() * keys.shape[-2] * (queries.shape[-1] + values.shape[-1])


# Floating-point operations of the functions that compute: torch's own formulas, but for attention, which before torch 2.15
# refuses shared keys, and for experts, of which it has none.
ATEN = torch.ops.aten
OPERATIONS = {
    **{
        function: flop_registry[function]
        for function in (ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.baddbmm, ATEN.convolution)
    },
    ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    ATEN._grouped_mm: _experts,
}


@dataclass(frozen=True)
class Peaks:
    """The most bytes at a time in a call, for any number of rows.

    Attributes:
        points: bytes that are there once, and for each row, at the times that may be the worst.
    """

    points: tuple[tuple[int, int], ...] = ((0, 0),)

    def of(self, rows: int) -> int:
        """Bytes of a call of so many rows."""
        return max(fixed + rows * each for fixed, each in self.points)

    def beside(self, fixed: int) -> Peaks:
        """The same beside further bytes."""
        return Peaks(tuple((fixed + own, each) for own, each in self.points))

    def shared(self, processes: int) -> Peaks:
        """The most on one of some processes that share a call: what comes with each row is cut into as many parts."""
        return Peaks(tuple((fixed, -(-each // processes)) for fixed, each in self.points))

    def __or__(self, other: Peaks) -> Peaks:
        """The most of two calls, one after the other."""
        return Peaks(self.points + other.points)


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate while it is entered, until they are freed.

    And the floating-point operations of matrix products, convolutions and attention in forward passes; the rest is small
    beside these.

    What is made of weights alone (their copies in half precision, those that quantised layers make anew) and gradients of
    weights take as much for any number of rows.

    Attributes:
        operations: floating-point ones since `restart`, by `OPERATIONS`.
        launches: functions of PyTorch that were called since `restart` and compute, as views do not; a core launches each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now, self._start = {True: 0, False: 0}, (0, 0)  # once (True), and of the row
        self._points: list[tuple[int, int]] = [(0, 0)]
        self._sizes: dict[int, tuple[int, bool]] = {}
        self.operations = self.launches = 0

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes allocated and not freed since `restart`: those that any number of rows needs once, and the row's."""
        return self._now[True] - self._start[0], self._now[False] - self._start[1]

    @property
    def now(self) -> int:
        """Bytes allocated and not freed since `restart`."""
        return sum(self.parts)

    @property
    def peak(self) -> int:
        """The most that `now` has been."""
        return self.peaks.of(1)

    @property
    def peaks(self) -> Peaks:
        """The most since `restart`, for any number of rows."""
        return Peaks(tuple(self._points))

    def restart(self) -> None:
        """Count from 0 again, whatever is allocated."""
        self._start, self._points = (self._now[True], self._now[False]), [(0, 0)]
        self.operations = self.launches = 0

    def lower(self) -> None:
        """Forget what the most has been, and not what is there."""
        self._points = [self.parts]

    def ignore(self, tensor: Tensor) -> None:
        """Leave a tensor that stays, a weight, out of the count."""
        self._sizes[tensor.untyped_storage()._cdata] = 0, True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index.Tensor and isinstance(args[0], FakeTensor):
            args = (args[0], _places(args[1]))
        if function in ANSWERED and isinstance(args[0], FakeTensor):
            return torch.tensor(ANSWERED[function])
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            raise NotImplementedError(f"a value of {tuple(args[0].shape)} numbers that do not exist is read")
        out = function(*args, **(kwargs or {}))
        self.launches += function.namespace == "aten" and not function.is_view
        formula = OPERATIONS.get(function._overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                self._add(tensor.untyped_storage(), once=self._is_once(function, args, kwargs))
        return out

    def _is_once(self, function, args, kwargs) -> bool:
        """Whether what a function makes is as large for any number of rows."""
        of_weights = [
            self._sizes.get(x.untyped_storage()._cdata, (0, False))[1]
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        ]
        return bool(of_weights) and (all(of_weights) or (function in SUMS and not any(of_weights)))

    def _add(self, storage: torch.UntypedStorage, *, once: bool) -> None:
        key = storage._cdata
        self._sizes[key] = storage.nbytes(), once
        weakref.finalize(storage, self._drop, key)
        self._now[once] += storage.nbytes()
        fixed, each = self.parts
        if not any(fixed <= a and each <= b for a, b in self._points):
            self._points = [(a, b) for a, b in self._points if a > fixed or b > each] + [(fixed, each)]

    def _drop(self, key: int) -> None:
        size, once = self._sizes.pop(key, (0, False))
        self._now[once] -= size


def _places(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Indices with real masks as the places where they are true, so that the shape of the result is known."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            places += index.nonzero(as_tuple=True)
        else:
            places.append(index)
    return places
