"""Activations that wait in host memory from the forward pass of an update to its backward pass: the same numbers to the bit.

PyTorch's own `save_on_cpu` copies the weights as well, each view of a tensor by itself, and gives copies back in another
order of memory, in which sums may round otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Tensor = torch.Tensor


@dataclass(kw_only=True)
class _Copy:
    """The bytes of a storage in host memory, as they were at one version of its content."""

    host: Tensor
    device: torch.device
    source: StorageWeakRef
    version: int
    returned: StorageWeakRef | None = None  # as long as a view of it is there

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is of a tensor whose storage has the address of its source."""
        return not self.source.expired() and self.version == tensor._version

    def back(self) -> torch.UntypedStorage:
        """The storage on its device, one for all the views of it that are there at a time."""
        back = self.returned
        storage = None if back is None else torch.UntypedStorage._new_with_weak_ptr(back.cdata)
        if storage is None:
            storage = self.host.to(self.device, non_blocking=True).untyped_storage()
            self.returned = StorageWeakRef(storage)
        return storage


@dataclass(frozen=True, kw_only=True)
class _Away:
    """A saved tensor, as a view of bytes in host memory."""

    copy: _Copy
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]

    def back(self) -> Tensor:
        """The tensor on its device, with the strides that it had."""
        empty = torch.empty(0, dtype=self.dtype, device=self.copy.device)
        return empty.set_(self.copy.back(), self.offset, self.size, self.stride)


class OffloadedTensors(torch.autograd.graph.saved_tensors_hooks):
    """A context in which graphs keep what they save in host memory, pinned beside a GPU; each storage is copied once.

    Args:
        weights: parameters and buffers, which stay where they are.

    Attributes:
        copied: bytes so far.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights if _is_plain(weight)}
        self.copies: dict[int, _Copy] = {}
        self.copied = 0
        super().__init__(self._pack, lambda kept: kept.back() if isinstance(kept, _Away) else kept)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.copies.clear()  # the graph keeps those that it needs

    def __enter__(self) -> OffloadedTensors:  # type: ignore[override]  # torch's returns nothing
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor | _Away:
        if not _is_plain(tensor) or tensor.untyped_storage().data_ptr() in self.weights:
            return tensor
        tensor = tensor.resolve_conj().resolve_neg()
        place = tensor.untyped_storage().data_ptr()
        copy = self.copies.get(place)
        if copy is None or not copy.is_of(tensor):  # another storage may have come to lie there
            self.copies[place] = copy = self._copy(tensor)
        return _Away(
            copy=copy,
            dtype=tensor.dtype,
            offset=tensor.storage_offset(),
            size=tensor.size(),
            stride=tensor.stride(),
        )

    def _copy(self, tensor: Tensor) -> _Copy:
        storage = tensor.untyped_storage()
        there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
        host.copy_(there, non_blocking=True)  # on the stream that wrote it, and that writes there next
        self.copied += storage.nbytes()
        return _Copy(host=host, device=tensor.device, source=StorageWeakRef(storage), version=tensor._version)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of PyTorch's own class and has a storage of numbers."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def offload_activations(module: torch.nn.Module) -> None:
    """Let what a network saves for its backward pass wait in host memory.

    With gradient checkpointing that is the inputs of its blocks; what is computed again in the backward pass stays.
    """
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with OffloadedTensors([*module.parameters(), *module.buffers()]):
            return forward(*args, **kwargs)

    module.forward = run
