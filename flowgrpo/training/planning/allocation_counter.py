"""Counter of the bytes that PyTorch operations allocate (fixed bytes and bytes per row), and of their FLOPs."""

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
# Results of reductions that networks read from fake tensors, as if all values were zero.
ANSWERED = {torch.ops.aten.all.default: True, torch.ops.aten.any.default: False}
# Products of two activations that sum over the rows. Their results are gradients of weights.
SUMS = (torch.ops.aten.mm.default, torch.ops.aten.embedding_dense_backward.default)


def _experts(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a layer of experts: rows (T, K), each times one matrix of (E, K, N)."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention(queries: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention on (B, heads, tokens, width); heads may share keys and values."""
    return 2 * queries.shape[:-1].numel() * keys.shape[-2] * (queries.shape[-1] + values.shape[-1])


# FLOP formulas: torch's, and ours for attention (torch's fail for shared keys before torch 2.15) and for experts.
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
    """Peak bytes of a call as a function of its rows."""

    points: tuple[tuple[int, int], ...] = ((0, 0),)  # fixed bytes and bytes per row at each moment that may be the peak

    def of(self, rows: int) -> int:
        """Return the peak bytes of a call with `rows` rows."""
        return max(fixed + rows * each for fixed, each in self.points)

    def beside(self, fixed: int, per_row: int = 0) -> Peaks:
        """Return the peaks with `fixed` bytes, and `per_row` for each row, added to every point."""
        return Peaks(tuple((fixed + constant, per_row + each) for constant, each in self.points))

    def split(self, processes: int) -> Peaks:
        """Return the peaks of one of `processes` that share each call: the bytes per row are divided among them."""
        return Peaks(tuple((fixed, -(-each // processes)) for fixed, each in self.points))

    def __or__(self, other: Peaks) -> Peaks:
        return Peaks(self.points + other.points)

    def __add__(self, other: Peaks) -> Peaks:
        """Return the sum of two peaks that last at the same time."""
        return Peaks(tuple((a + c, b + d) for a, b in self.points for c, d in other.points))


class AllocationCounter(TorchDispatchMode):
    """A context that counts the live bytes, the FLOPs and the kernel launches of all operations in it.

    Tensors computed from weights alone (half-precision copies, dequantised layers) and gradients of weights count as
    fixed bytes. All other tensors count as bytes per row. `operations` are the FLOPs since `restart` of the functions in
    `OPERATIONS`. `launches` counts the calls since `restart` of PyTorch functions that do not return views.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now, self._start = {True: 0, False: 0}, (0, 0)  # fixed bytes (True), bytes per row (False)
        self._points: list[tuple[int, int]] = [(0, 0)]
        self._sizes: dict[int, tuple[int, bool]] = {}
        self.operations = self.launches = 0

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes allocated since `restart` and still alive: (fixed, per row)."""
        return self._now[True] - self._start[0], self._now[False] - self._start[1]

    @property
    def now(self) -> int:
        """Bytes allocated since `restart` and still alive, for one row."""
        return sum(self.parts)

    @property
    def peak(self) -> int:
        """Maximum of `now` since `restart`."""
        return self.peaks.of(1)

    @property
    def peaks(self) -> Peaks:
        """Peak bytes since `restart` as a function of the rows."""
        return Peaks(tuple(self._points))

    def restart(self) -> None:
        """Start counting from 0."""
        self._start, self._points = (self._now[True], self._now[False]), [(0, 0)]
        self.operations = self.launches = 0

    def lower(self) -> None:
        """Reset the peak to the bytes that are alive now."""
        self._points = [self.parts]

    def ignore(self, tensor: Tensor) -> None:
        """Treat a tensor as a weight: do not count its bytes."""
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
