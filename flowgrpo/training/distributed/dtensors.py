"""Tensors that may lie in shards: as a whole, a process's part of them, and moved together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that may lie in shards; what is written to it is written to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, which every process has, in the shards of another; as it is where that lies in none."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a whole; of one in shards all processes must ask for it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def follow(slow: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], decay: float) -> None:
    """Move tensors towards others of which they are averages, each in its own part of what lies in shards."""
    own, others = [local(each) for each in slow], [local(each) for each in tensors]
    if decay:
        torch._foreach_lerp_(own, others, 1 - decay)
    else:
        torch._foreach_copy_(own, others)
