"""Count the bytes that operations allocate, once or per row, and their floating-point operations."""

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
# Answers, as for zeros, to questions that networks ask about values that do not exist.
ANSWERED = {torch.ops.aten.all.default: True, torch.ops.aten.any.default: False}
# Products of two activations sum over the rows: these are gradients of weights.
SUMS = (torch.ops.aten.mm.default, torch.ops.aten.embedding_dense_backward.default)


def _experts(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of rows (T, K), each times one matrix of (E, K, N), as in a layer of experts."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention(queries: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of attention on (B, heads, tokens, width); heads may share keys and values."""
    return 2 * queries.shape[:-1].numel() * keys.shape[-2] * (queries.shape[-1] + values.shape[-1])


# Torch's FLOP formulas. Ours replace those of attention, which refuse shared keys before torch 2.15, and add experts.
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
    """Peak bytes of a call as a function of its rows.

    Attributes:
        points: (fixed bytes, bytes per row) at each moment that may be the peak.
    """

    points: tuple[tuple[int, int], ...] = ((0, 0),)

    def of(self, rows: int) -> int:
        """Return the peak bytes of a call with `rows` rows."""
        return max(fixed + rows * each for fixed, each in self.points)

    def beside(self, fixed: int) -> Peaks:
        """Add fixed bytes to every point."""
        return Peaks(tuple((fixed + own, each) for own, each in self.points))

    def shared(self, processes: int) -> Peaks:
        """Divide the bytes per row among processes that share a call."""
        return Peaks(tuple((fixed, -(-each // processes)) for fixed, each in self.points))

    def __or__(self, other: Peaks) -> Peaks:
        """Return the peak of two calls that run one after the other."""
        return Peaks(self.points + other.points)


class AllocationCounter(TorchDispatchMode):
    """Count live bytes, floating-point operations and kernel launches of all operations while entered.

    Tensors computed from weights alone (half-precision copies, dequantised layers) and gradients of weights count as fixed
    bytes; all others scale with the rows.

    Attributes:
        operations: FLOPs since `restart`, of the functions in `OPERATIONS`.
        launches: calls of PyTorch functions that compute since `restart`; views do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now, self._start = {True: 0, False: 0}, (0, 0)  # fixed (True), per row (False)
        self._points: list[tuple[int, int]] = [(0, 0)]
        self._sizes: dict[int, tuple[int, bool]] = {}
        self.operations = self.launches = 0

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes allocated since `restart` and still alive: fixed ones, and those of the row."""
        return self._now[True] - self._start[0], self._now[False] - self._start[1]

    @property
    def now(self) -> int:
        """Bytes allocated since `restart` and still alive."""
        return sum(self.parts)

    @property
    def peak(self) -> int:
        """Maximum of `now` since `restart`."""
        return self.peaks.of(1)

    @property
    def peaks(self) -> Peaks:
        """Peak since `restart`, for any number of rows."""
        return Peaks(tuple(self._points))

    def restart(self) -> None:
        """Start counting from 0."""
        self._start, self._points = (self._now[True], self._now[False]), [(0, 0)]
        self.operations = self.launches = 0

    def lower(self) -> None:
        """Lower the peak to what is alive now."""
        self._points = [self.parts]

    def ignore(self, tensor: Tensor) -> None:
        """Leave a weight out of the count."""
        self._sizes[tensor.untyped_storage()._cdata] = 0, True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index.Tensor and isinstance(args[0], FakeTensor):
            args = (args[0], _true_indices(args[1]))
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
        """Return whether the size of a result does not depend on the rows."""
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


def _true_indices(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Replace real masks by the indices of their true elements, so that the shape of the result is known."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            places += index.nonzero(as_tuple=True)
        else:
            places.append(index)
    return places
