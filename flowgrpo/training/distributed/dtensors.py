"""Helpers for tensors that may be sharded (DTensors)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard, which shares memory with the tensor; return a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a tensor, which every process holds whole, like `like`; return it unchanged if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. This is a collective call if the tensor is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def follow(slow: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], decay: float) -> None:
    """Update moving averages in place: decay x slow + (1 - decay) x tensors."""
    own, others = [local(each) for each in slow], [local(each) for each in tensors]
    if decay:
        torch._foreach_lerp_(own, others, 1 - decay)
    else:
        torch._foreach_copy_(own, others)
