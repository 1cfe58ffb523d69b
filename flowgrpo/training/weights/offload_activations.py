"""Offload of activations to host memory between the forward and the backward pass; results stay equal to the bit.

PyTorch's `save_on_cpu` also copies weights, copies each view of a tensor separately, and returns copies in another
memory order, so that sums may round differently.
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
    """A host copy of a storage's bytes at one version of its content."""

    host: Tensor
    device: torch.device
    source: StorageWeakRef
    version: int
    returned: StorageWeakRef | None = None  # storage of the restored bytes on the device, while a view of it exists

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether the copy holds the content of `tensor`, whose storage is at the address of the copied storage."""
        return not self.source.expired() and self.version == tensor._version

    def restore(self) -> torch.UntypedStorage:
        """Return the bytes as a storage on the device; all views that exist at the same time share it."""
        returned = self.returned
        storage = None if returned is None else torch.UntypedStorage._new_with_weak_ptr(returned.cdata)
        if storage is None:
            storage = self.host.to(self.device, non_blocking=True).untyped_storage()
            self.returned = StorageWeakRef(storage)
        return storage


@dataclass(frozen=True, kw_only=True)
class _SavedView:
    """A saved tensor, as a view of a host copy."""

    copy: _Copy
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]

    def restore(self) -> Tensor:
        """Return the tensor on its device, with its original strides."""
        empty = torch.empty(0, dtype=self.dtype, device=self.copy.device)
        return empty.set_(self.copy.restore(), self.offset, self.size, self.stride)


class OffloadedTensors(torch.autograd.graph.saved_tensors_hooks):
    """A context in which autograd graphs save tensors in host memory (pinned for a GPU). Each storage is copied once.

    The `weights` (parameters and buffers) are not copied. `copied` is the number of copied bytes.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights if _is_plain(weight)}
        self.copies: dict[int, _Copy] = {}
        self.copied = 0
        super().__init__(self._pack, lambda kept: kept.restore() if isinstance(kept, _SavedView) else kept)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.copies.clear()  # the graph keeps references to the copies that it needs

    def __enter__(self) -> OffloadedTensors:  # type: ignore[override]  # torch's returns nothing
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor | _SavedView:
        if not _is_plain(tensor) or tensor.untyped_storage().data_ptr() in self.weights:
            return tensor
        tensor = tensor.resolve_conj().resolve_neg()
        place = tensor.untyped_storage().data_ptr()
        copy = self.copies.get(place)
        if copy is None or not copy.is_of(tensor):  # the address may have been reused
            self.copies[place] = copy = self._copy(tensor)
        offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        return _SavedView(copy=copy, dtype=tensor.dtype, offset=offset, size=size, stride=stride)

    def _copy(self, tensor: Tensor) -> _Copy:
        storage = tensor.untyped_storage()
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
        host.copy_(content, non_blocking=True)  # safe, since later writes to the storage are on the same stream
        self.copied += storage.nbytes()
        return _Copy(host=host, device=tensor.device, source=StorageWeakRef(storage), version=tensor._version)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def offload_activations(module: torch.nn.Module) -> None:
    """Wrap a network's forward so that the tensors saved for its backward pass are offloaded.

    With gradient checkpointing these are the inputs of the network's blocks.
    """
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with OffloadedTensors([*module.parameters(), *module.buffers()]):
            return forward(*args, **kwargs)

    module.forward = run
