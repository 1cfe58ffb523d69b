"""Whether an error says that memory ran out."""

from __future__ import annotations

import sys

# What PyTorch and the libraries below it say in a RuntimeError without a class of its own: on the CPU, on Apple's GPUs, and
# where cuBLAS or cuDNN ask for memory themselves.
SAID = ("can't allocate memory", "not enough memory", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was too little memory, of a GPU or of this machine."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAID)
