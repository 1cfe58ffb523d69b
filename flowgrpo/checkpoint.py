"""Checkpoints: complete or absent, and enough to go on as if nothing had happened.

A checkpoint is a folder `step-000010` with `weights.safetensors` (trained tensors and their average), `optimizer.pt` (with
the loss scaler), `random.pt` (the global generators, which only plug-ins use) and `state.json`. It is written beside its
place and renamed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from flowgrpo.errors import InputError
from flowgrpo.weights import Weights


def save(
    folder: Path,
    step: int,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    random_states: list,
    beta: float,
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and delete all but the last `keep`.

    Args:
        folder: the run's `checkpoints`.
        random_states: `random_state()` of every process.
        beta: coefficient of the divergence, which may adapt.
    """
    target = folder / f"step-{step:06d}"
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)
    partial = folder / f".{target.name}.partial"
    partial.mkdir(parents=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in weights.tensors().items()}
    save_file(tensors, partial / "weights.safetensors")
    torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, partial / "optimizer.pt")
    torch.save(random_states, partial / "random.pt")
    (partial / "state.json").write_text(json.dumps({"step": step, "updates": weights.updates, "beta": beta}))
    for path in (*partial.iterdir(), partial):
        _flush(path)
    if target.exists():
        _delete(target)
    os.replace(partial, target)
    _flush(folder)
    for old in steps(folder)[:-keep]:
        _delete(folder / f"step-{old:06d}")
    return target


def _delete(checkpoint: Path) -> None:
    """Under another name first, so that no moment sees half of it."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden)


def steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, ascending."""
    return sorted(int(state.parent.name.removeprefix("step-")) for state in folder.glob("step-[0-9]*/state.json"))


def find(folder: Path, step: int | None = None) -> Path:
    """The checkpoint of `step`, or the latest.

    Raises:
        InputError: there is none.
    """
    known = steps(folder)
    if not known:
        raise InputError(f"{folder}: there is no checkpoint")
    if step is not None and step not in known:
        raise InputError(f"{folder}: there is no checkpoint of step {step}, there are {', '.join(map(str, known))}")
    return folder / f"step-{known[-1] if step is None else step:06d}"


def load_weights(checkpoint: Path, weights: Weights) -> int:
    """Put a checkpoint's trained tensors and their average in place; returns its step."""
    state = json.loads((checkpoint / "state.json").read_text())
    weights.load(load_file(checkpoint / "weights.safetensors"), state["updates"])
    return state["step"]


def load(
    checkpoint: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    process: int = 0,
) -> tuple[int, float]:
    """Put everything of a checkpoint in place; returns its step and its coefficient of the divergence."""
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True, map_location="cpu")
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    states = torch.load(checkpoint / "random.pt", weights_only=True, map_location="cpu")
    if process < len(states):
        set_random_state(states[process])
    state = json.loads((checkpoint / "state.json").read_text())
    if "beta" not in state:
        raise InputError(f"run.resume: {checkpoint} was written by an earlier version of flowgrpo, which kept less")
    return load_weights(checkpoint, weights), state["beta"]


def random_state() -> dict[str, Any]:
    """State of the global generators of torch, numpy and python, in types that load as plain data."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Undo what happened since `random_state` returned `state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
