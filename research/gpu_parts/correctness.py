"""Checks of training on a GPU: the ratio before the first optimizer step, compiled blocks, and a killed and resumed run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import flow_sizes
import torch
from flow_sizes import Size
from safetensors.torch import load_file

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.networks.captured_calls import CapturedCalls
from flowgrpo.flow.pipeline.networks.compiled_blocks import CompiledBlocks
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.training.loop import Loop
from flowgrpo.training.planning.memory_phases import with_setting
from gpu_parts import iteration

MODELS = ("shapes", "small SD3")  # the embedded model, and Stable Diffusion 3.5's classes made small
ITERATIONS = 3  # of a resumed run, whose process is killed when the last one begins


def size_of(name: str, dtype: str, *, shrunk: bool) -> Size:
    """Return the size of one of `MODELS`, with a group of two calls; with `shrunk`, of two samples."""
    size, rows = (
        flow_sizes.SIZES["shapes"] if name == "shapes" else flow_sizes.shrunk("sd35-medium"),
        1 if shrunk else 4,
    )
    return replace(size, rows=(rows,), group=2 * rows, dtype=dtype, call={**size.call, "num_inference_steps": 3})


def log_ratio(
    name: str, dtype: str, *, compiled: bool = False, captured: bool = False, shrunk: bool = False
) -> dict[str, float]:
    """Return the largest |log ratio| before the optimizer step of two iterations: 0 in float32.

    Returns:
        `same_calls`, where the update repeats the calls of the rollout; unless `compiled`, `other_calls`, where its calls
        have half the rows; if so, `velocity`, the largest difference from the eager velocity, over the largest of these.

    Raises:
        RuntimeError: the rollouts are to be `captured` as CUDA graphs, and the network has none.
    """
    iteration.forget()
    size = size_of(name, dtype, shrunk=shrunk)
    rows = size.rows[0]
    policy, weights = flow_sizes.begun(size)
    found, batches = {}, {"same_calls": rows, "other_calls": 2 * rows}
    if compiled:
        eager = _velocity(policy, rows)
        CompiledBlocks(policy.modules.values())
        found["velocity"] = float((_velocity(policy, rows) - eager).abs().max() / eager.abs().max())
        del batches["other_calls"]  # other rows would be compiled anew
    replayed = CapturedCalls(policy.modules.values()) if captured else None
    for key, rollout_batch in batches.items():
        loop = flow_sizes.trainer_of(
            policy, weights, flow_sizes.settings(size, "chain", rows, rollout_batch=rollout_batch, replay="always")
        )
        found[key] = max(loop.iterate()["policy/max_abs_log_ratio"] for _ in range(2))
    if replayed is not None and not replayed.replays:
        raise RuntimeError("the network has no CUDA graphs")
    return found


@torch.no_grad()
def _velocity(policy: DiffusersPolicy, rows: int) -> torch.Tensor:
    asked = [Row("a red circle", seed) for seed in range(rows)]
    policy.prepare(asked)
    return policy.velocity(policy.start(asked), policy.sigmas[1], asked)[0].float()


def resumed(name: str, dtype: str, *, shrunk: bool = False) -> dict[str, Any]:
    """Return how far a run that was killed and resumed ends from one that was not, by deterministic algorithms.

    The process of the first run kills itself (SIGKILL) before its last iteration.

    Returns:
        `equal`, whether all weights are equal to the bit, and `largest_difference` of a weight.

    Raises:
        RuntimeError: a process ended otherwise than it should.
    """
    size = size_of(name, dtype, shrunk=shrunk)
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with tempfile.TemporaryDirectory() as folder:
        for words, status in ((("whole", "killed"), -signal.SIGKILL), (("resumed",), 0)):
            process = context.Process(target=train, args=(size, folder, words))
            process.start()
            process.join()
            if process.exitcode != status:
                raise RuntimeError(
                    f"the process of {' and '.join(words)} ended with status {process.exitcode}, not {status}"
                )
        one, other = (_weights(Path(folder) / place) for place in ("whole", "killed"))
    gaps = [float((one[key].float() - other[key].float()).abs().max()) for key in one]
    return {"equal": all(torch.equal(one[key], other[key]) for key in one), "largest_difference": max(gaps)}


def train(size: Size, folder: str, words: Sequence[str]) -> None:
    """Make runs in `folder`, one for each word: `whole`, `killed`, or `resumed`, which goes on with the killed one."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when the GPU is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    for word in words:
        loop = _loop(size, Path(folder), "whole" if word == "whole" else "killed")
        if word == "killed":
            _kill_at_last(loop)
        elif word == "resumed":
            loop.checkpoints.resume()
            assert loop.state.done == ITERATIONS - 1
        loop.run()


def _loop(size: Size, folder: Path, run: str) -> Loop:
    chosen = flow_sizes.settings(size, "chain", size.rows[0], iterations=ITERATIONS, learning_rate=1e-3)
    for key, value in {"dir": str(folder), "name": run, "trees": None, "checkpoint.every": 1}.items():
        chosen = with_setting(chosen, f"run.{key}", value)
    torch.manual_seed(0)  # of new adapters
    return flow_sizes.trainer_of(*flow_sizes.begun(size), chosen)


def _kill_at_last(loop: Loop) -> None:
    iterate = loop.iterate

    def killing() -> dict[str, Any]:
        if loop.state.done == ITERATIONS - 1:
            loop.background.wait()  # until the checkpoint is written
            os.kill(os.getpid(), signal.SIGKILL)
        return iterate()

    loop.iterate = killing


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{ITERATIONS:06d}" / "weights.safetensors")
