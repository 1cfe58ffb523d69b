"""What loading a policy does to the process."""

import platform
import subprocess
import sys

import pytest

FAULTS_OF_TEN_TENSORS = """
import resource, torch, flowgrpo
flowgrpo.load_policy("shapes", device="cpu")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(4 << 20)  # the heap grows to what is needed, and settles
before = faults()
for _ in range(10):
    torch.ones(4 << 20)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")
def test_freed_memory_is_handed_out_again_without_a_page_fault():
    ran = subprocess.run([sys.executable, "-c", FAULTS_OF_TEN_TENSORS], capture_output=True, text=True, check=True)
    assert int(ran.stdout.split()[-1]) < 1000  # 40,960 pages of 4 KiB if each tensor is mapped afresh
