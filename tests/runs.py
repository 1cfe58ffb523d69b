"""Runs of the tiny model by command: what they leave in their folder, and runs in another process."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager

import forked
import torch
from safetensors import safe_open
from safetensors.torch import load_file

CALL = {"num_inference_steps": 3, "guidance_scale": 1.0, "height": 16, "width": 16, "max_sequence_length": 1}


def metrics(folder, phase="train"):
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in written if line["phase"] == phase]


def weights(folder, step):
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    if any(checkpoint.glob("shard-*")):
        every = from_shards(checkpoint)
        return {name.removeprefix("weights."): t for name, t in every.items() if name.startswith("weights.")}
    return load_file(checkpoint / "weights.safetensors")


def from_shards(checkpoint):
    """Join the shards of a checkpoint by the headers of the files."""
    parts = defaultdict(list)
    for path in checkpoint.glob("shard-*.safetensors"):
        with safe_open(path, "pt") as file:
            said = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118, it is not a mapping
                parts[name].append((said[name]["saved_offsets"], file.get_tensor(name)))
    return {name: torch.cat([part for _, part in sorted(own, key=lambda each: each[0])]) for name, own in parts.items()}


def background(*arguments, **environment):
    """Start a command in another process, with its imports done."""
    return forked.Command(arguments, environment)


@contextmanager
def serving(*words, folder="."):
    """Serve rewards from a folder in a process, and yield it and their URLs by name."""
    process = forked.Command(["serve", *words, "--port", "0"], {}, folder)
    try:
        yield process, dict(line.split() for line in process.lines(len(words)))
    finally:
        process.kill()
        process.wait()


def interpreter(*arguments, **environment):
    """Start a command in a new interpreter."""
    return subprocess.Popen(
        [sys.executable, "-m", "flowgrpo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def at_rollout(monkeypatch, iteration, act):
    """Let a run of pictures do something before the rollout of an iteration."""
    from flowgrpo.flow.trainer import FlowWing

    real = FlowWing.rollout

    def rollout(trainer, number, groups):
        if number == iteration:
            act()
        return real(trainer, number, groups)

    monkeypatch.setattr(FlowWing, "rollout", rollout)


def wait_for(path, process, seconds=120):
    for _ in range(seconds * 20):
        if path.exists() or process.poll() is not None:
            return
        time.sleep(0.05)
