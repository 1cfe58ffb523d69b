"""Runs of the tiny model by command: what they leave in their folder, and such as go on in another process."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import forked
from safetensors.torch import load_file

CALL = {"num_inference_steps": 4, "guidance_scale": 1.0, "height": 16, "width": 16, "max_sequence_length": 1}


def metrics(folder, phase="train"):
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in written if line["phase"] == phase]


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "weights.safetensors")


def background(*arguments, **environment):
    """A command in another process, which begins with its imports done."""
    return forked.Command(arguments, environment)


@contextmanager
def serving(*words, folder="."):
    """A process that serves rewards from a folder, and their URLs by name."""
    process = forked.Command(["serve", *words, "--port", "0"], {}, folder)
    try:
        yield process, dict(line.split() for line in process.lines(len(words)))
    finally:
        process.kill()
        process.wait()


def interpreter(*arguments, **environment):
    """A command in an interpreter of its own, from its first import on."""
    return subprocess.Popen(
        [sys.executable, "-m", "flowgrpo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def wait_for(path, process, seconds=120):
    for _ in range(seconds * 20):
        if path.exists() or process.poll() is not None:
            return
        time.sleep(0.05)
