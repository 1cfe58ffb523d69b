"""Measure a served reward: images per second through `flowgrpo serve` in another process, and by a call in this one.

    python research/bench_serve.py [--reward shapes] [--batch 16 32 64 512] [--seconds 5] [--transport float32]

The pictures are drawn captions of the embedded model, 64 x 64. The two ways take turns, batch by batch, one thread
each, so that other work on the machine slows both. It slows the served call more, which needs two processes. So the
fastest call of each way is printed beside the mean, as an estimate for an idle machine. The rewards must be equal, or
the script fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

import rewards
from flowgrpo.data.generators.scenes import arrange, draw, every_caption
from rewards.memory import keep_freed_memory


def pictures(number: int) -> tuple[torch.Tensor, list[str]]:
    """Return pictures (number, 3, 64, 64) of captions, with a little noise, and the captions."""
    rng = np.random.default_rng(0)
    texts = [every_caption()[i] for i in rng.integers(0, len(every_caption()), number)]
    images = np.stack([draw(arrange(text, rng)) for text in texts])
    noisy = (images + 0.02 * rng.standard_normal(images.shape)).clip(0, 1)
    return torch.from_numpy(noisy.astype(np.float32)), texts


def compare(name: str, url: str, transport: str, batch: int, seconds: float) -> None:
    """Call both ways in turns and print their speeds."""
    samples, prompts = pictures(batch)
    both = [rewards.load(name), rewards.load(url, options={"transport": transport})]
    local, served = (reward(samples, prompts, {}) for reward in both)
    if transport == "float32" and not local.equal(served):
        raise SystemExit(f"the served numbers are others: {local} and {served}")
    times = []
    while np.sum(times) < seconds:
        times.append([_timed(lambda reward=reward: reward(samples, prompts, {})) for reward in both])
    for what, (here, there) in (("mean", np.mean(times, 0)), ("fastest", np.min(times, 0))):
        speeds = f"{batch / here:6.0f} images/s here, {batch / there:6.0f} served ({100 * here / there:.0f} %)"
        print(f"batch {batch:3}, {what:>7} of {len(times):4} calls: {speeds}")


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", default="shapes")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 32, 64, 512])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each batch size")
    parser.add_argument("--transport", default="float32")
    options = parser.parse_args()
    keep_freed_memory()  # as training does
    command = [sys.executable, "-m", "flowgrpo", "serve", options.reward, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[1]
            for batch in options.batch:
                compare(options.reward, url, options.transport, batch, options.seconds)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
