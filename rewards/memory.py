"""Recognise out-of-memory errors, and keep freed memory in the process."""

from __future__ import annotations

import ctypes
import platform
import sys

# Messages of plain RuntimeErrors: of PyTorch on the CPU and on Apple's GPUs, of cuBLAS and of cuDNN.
SAID = ("can't allocate memory", "not enough memory", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error reports too little memory, on a GPU or on this machine."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAID)


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks instead of returning them to the system, which would fault in every page again.

    On a CPU this halves the time of a small model's evaluation and of a reward server's answer. Blocks of up to 32 MiB
    (glibc's maximum) come from the heap, which keeps up to 1 GiB unused.
    """
    if platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3  # malloc.h
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 1 << 30)
