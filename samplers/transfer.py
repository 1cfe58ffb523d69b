"""Sending what the host has made to where the model computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sendable(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Room for float32 numbers on the host that `sent` sends to a device as it is: pinned, where that is a GPU."""
    return torch.empty(
        tuple(shape), dtype=torch.float32, pin_memory=device.type == "cuda" and torch.cuda.is_available()
    )


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device. From the host to a GPU it goes by pinned memory, so that the host does not wait for the GPU.

    A copy that waits would keep the host from preparing the next call of the model while the GPU computes this one.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_available():
        tensor = tensor.pin_memory()  # itself, if it is
    return tensor.to(device, non_blocking=device.type != "cpu")
