"""The check of a GPU at a tiny size, in its own process: it forks, which PyTorch refuses once something was compiled."""

import json
import os
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import taped

from flowgrpo.flow.pipeline.networks.captured_calls import CapturedCalls

ROOT = Path(__file__).parents[1]


def captured(found):
    """Check and measure rollouts by graphs, which are repeated operations here; write what is found to a file."""
    sys.path[:0] = [str(ROOT / "research")]
    from gpu_parts import correctness, flow

    for module in (correctness, flow):
        module.CapturedCalls = partial(CapturedCalls, capture=taped.capture)
    correct = correctness.log_ratio("small SD3", "float32", captured=True, shrunk=True)
    fast = flow.measured("sd35-medium", 1, captured=True, shrunk=True)
    Path(found).write_text(json.dumps([correct, fast]))


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
