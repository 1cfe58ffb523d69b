"""What a model computes with: the dtypes that can be asked for by name, the device of this machine, and attention."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> torch.device:
    """Return the first GPU, or the CPU on a machine without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def leave_out_cudnn_attention() -> None:
    """Let PyTorch's own attention of this process take FlashAttention's kernel and those after it, never cuDNN's.

    PyTorch 2.11 and later take cuDNN's first on an H100 or H200. There its backward pass can read memory that is not its own
    (seen with PyTorch 2.11 and cuDNN 9.19 in the first update of FLUX.1's shape in bfloat16, which ended the run; without it
    the same update went well) or give NaN (pytorch/pytorch issue 196678, with a mask), and on a B200 its forward pass was
    reported wrong where few heads of keys serve many of queries (issue 193893). Who asks for it by its own name, as in
    `model.attention: _native_cudnn`, still has it.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
