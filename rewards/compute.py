"""Dtypes by name, the default device, batches, and the attention kernels that PyTorch may choose."""

from __future__ import annotations

from typing import Any

import torch

from rewards import process_state

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> torch.device:
    """Return the first GPU, or the CPU on a machine without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batched(rows: Any, size: int) -> list[Any]:
    """Split a tensor, an array or a list into consecutive parts of `size` rows; the last part may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def leave_out_cudnn_attention() -> None:
    """Exclude cuDNN from PyTorch's scaled dot product attention in this process.

    PyTorch 2.11 prefers cuDNN on an H200. With cuDNN 9.19 the first bfloat16 update of FLUX.1's shape ended there in an
    illegal memory access in the backward pass. Others report NaN gradients on an H100 and H200 with a mask (pytorch/pytorch
    issue 196678) and a wrong forward pass on a B200 with fewer than eight heads of keys (issue 193893). Diffusers' backend
    `_native_cudnn` still uses cuDNN.
    """
    process_state.LEFT_OUT.add("cudnn")  # stays excluded when a plug-in's changes are undone
    torch.backends.cuda.enable_cudnn_sdp(False)
