"""What a model computes with: the dtypes that can be asked for by name, the device of this machine, and attention."""

from __future__ import annotations

import torch

from rewards import process_state

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> torch.device:
    """Return the first GPU, or the CPU on a machine without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def leave_out_cudnn_attention() -> None:
    """Let PyTorch's own attention take any kernel but cuDNN's from here on, in the whole process.

    On an H200 PyTorch 2.11 takes cuDNN's first. With cuDNN 9.19 the first update of FLUX.1's shape in bfloat16 ended in an
    illegal memory access there, in its backward pass, and went well without it. Others report gradients that are NaN on an
    H100 and H200, with a mask (pytorch/pytorch issue 196678), and a wrong forward pass on a B200, with fewer than eight
    heads of keys (issue 193893). Diffusers' backend `_native_cudnn` still has it.
    """
    process_state.LEFT_OUT.add("cudnn")  # a plug-in's import that asks for it, or undoes it, leaves it out
    torch.backends.cuda.enable_cudnn_sdp(False)
