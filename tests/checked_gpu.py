"""The check of a GPU at a tiny size, in its own process: it forks, which PyTorch refuses once something was compiled."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measured(words, said):
    """Run scripts/gpu_check.py without compilation, which takes a minute; write what it prints to a file."""
    sys.path[:0] = [str(ROOT / "research"), str(ROOT / "scripts")]
    import gpu_check
    from gpu_parts import correctness, flow

    for module in (correctness, flow):
        module.CompiledBlocks = lambda networks: None
    with open(said, "w") as file, redirect_stdout(file):
        status = gpu_check.main(words)
    os._exit(status)
