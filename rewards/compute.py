"""What a model computes with: the dtypes that can be asked for by name, and the device of this machine."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> torch.device:
    """Return the first GPU, or the CPU on a machine without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
