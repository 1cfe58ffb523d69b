"""Map a function over all tensors of a nested value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `change` to each tensor in lists, maps, dataclasses and output objects of networks."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (torch.Generator, torch.nn.Module, type)) or callable(value):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, x) for x in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, x) for x in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(change, getattr(value, f.name)) for f in fields(value) if f.init})
    if isinstance(value, Mapping):
        kind: Any = type(value)
        return kind({key: map_tensors(change, x) for key, x in value.items()})
    # E.g. the latent distribution of a VAE.
    if any(isinstance(x, torch.Tensor) for x in getattr(value, "__dict__", {}).values()):
        changed = copy.copy(value)
        vars(changed).update({key: map_tensors(change, x) for key, x in vars(value).items()})
        return changed
    return value
