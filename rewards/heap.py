"""Memory of this process that is not returned to the system each time."""

from __future__ import annotations

import ctypes
import platform


def keep_freed_memory() -> None:
    """Let glibc hand freed blocks out again instead of returning them to the system and faulting in every page anew.

    On a CPU this halves the time of a small model's evaluation, and that of a reward server's answer. The bounds hold for
    this process: blocks of up to 32 MiB (the most glibc takes) come from the heap, of which up to 1 GiB may lie unused.
    """
    if platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3  # malloc.h
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 1 << 30)
