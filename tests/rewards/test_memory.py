"""What glibc does with memory that was freed."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

HEAP = Path(__file__).parents[2] / "rewards" / "memory.py"
FAULTS_OF_EIGHT_BLOCKS = """
import ctypes, resource, runpy, sys
if sys.argv[1] == "kept":
    runpy.run_path(sys.argv[2])["keep_freed_memory"]()
libc, size = ctypes.CDLL(None), 16 << 20
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")
def test_freed_memory_is_handed_out_again_without_a_page_fault():
    """The eight blocks have 32,768 pages of 4 KiB; a system that gives larger ones faults more seldom."""
    command = [sys.executable, "-S", "-c", FAULTS_OF_EIGHT_BLOCKS]
    kept, plain = (int(subprocess.check_output([*command, how, HEAP])) for how in ("kept", "plain"))
    assert kept < plain / 10
