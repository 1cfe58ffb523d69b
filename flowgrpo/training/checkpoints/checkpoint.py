"""Checkpoints: complete or absent, and enough to go on as if nothing had happened. `snapshot` writes them.

A checkpoint is a folder `step-000010` with `weights.safetensors` (trained tensors and their average), `optimizer.pt` (with
the loss scaler), `random.pt` (the global generators, which only plug-ins use), where rollouts are behind (`run.staleness`)
`versions.safetensors` with the weights of the iterations before, and `state.json` with a digest of each. Where the trained
tensors lie in shards, those of all processes are in `shard-*.safetensors` instead, and the optimizer's moments with them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.training.checkpoints import digests, shards
from flowgrpo.training.distributed.dtensors import local, placed_as
from flowgrpo.training.run import random_states, run_folder
from flowgrpo.training.run.run_files import is_number
from flowgrpo.training.run.stop_reasons import is_lost
from flowgrpo.training.weights import optimizers
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import AVERAGE, OTHER_POLICIES, Weights
from rewards.memory import is_out_of_memory

WHOLE = "weights.safetensors"
VERSIONS = "versions.safetensors"
# What the names of tensors in shards begin with: the trained ones as `Weights.tensors` names them, moments by the number of
# their parameter, and older versions by their iteration.
WEIGHTS, MOMENTS, OLDER = "weights.", "moments.", "versions."
TAKE_AWAY = "; take it away to go on from the one before"


def is_sound(checkpoint: Path) -> bool:
    """Whether the weights of a checkpoint can be trusted (`training.reports.learning_signal`); a damaged one's cannot."""
    try:
        return _state(checkpoint).get("sound", True)
    except InputError:
        return False


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, renamed first, so that half of it is never taken for a whole one."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden)


def place_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:06d}"


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, whole or damaged, ascending."""
    names = (path.name for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{6,9}", name, re.ASCII))


def find(folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint of `step`, or the latest.

    Raises:
        InputError: there is no such checkpoint.
    """
    known = steps(folder)
    if not known:
        raise InputError(f"{folder}: there is no checkpoint")
    if step is not None and step not in known:
        raise InputError(f"{folder}: there is no checkpoint of step {step}, there are {', '.join(map(str, known))}")
    return place_of(folder, known[-1] if step is None else step)


@dataclass(frozen=True)
class Choice:
    """The step that a resume goes on from, None where there is no checkpoint, and what is wrong with later ones."""

    step: int | None
    damaged: list[str]

    @property
    def warning(self) -> str | None:
        """What is said of the checkpoints that the resume passes over, if it does."""
        return f"{'; '.join(self.damaged)}; the run goes on from step {self.step}" if self.damaged else None


def chosen(folder: Path) -> Choice:
    """Choose the checkpoint that a resume goes on from: of those that are whole the latest sound one, or the latest.

    Raises:
        InputError: there are checkpoints, and none of them is whole.
    """
    damaged, unsound = [], None
    for step in reversed(steps(folder)):
        place = place_of(folder, step)
        problem = _problem(place, _stamp(place))
        if problem is not None:
            damaged.append(problem)
        elif _state(place).get("sound", True):
            return Choice(step, damaged)
        else:
            unsound = unsound or Choice(step, [*damaged])
    if damaged and unsound is None:
        others = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise InputError(
            f"run.resume: no checkpoint is whole ({damaged[0]}{others}); put back a copy, or begin again with another "
            "run.name"
        )
    return unsound or Choice(None, [])


def resumed(folder: Path) -> int | None:
    """The step that a resume goes on from, or None; see `chosen`."""
    return chosen(folder).step


def latest(folder: Path) -> int | None:
    """The step of the latest sound checkpoint, or of the latest if none is, or None, as far as their states tell."""
    known = steps(folder)
    return next((step for step in reversed(known) if is_sound(place_of(folder, step))), known[-1] if known else None)


def rest(folder: Path, done: int) -> str:
    """Which checkpoint a resume of a run goes on from that stops after `done` iterations, as the head of the command."""
    step = latest(folder)
    if step is None:
        return "there is no checkpoint, begin again"
    if step < done:
        which = "the last that was sound" if is_sound(place_of(folder, step)) else "the last"
        return f"go on from step {step}, {which},"
    return "a checkpoint is written, go on"


def way_on(run: Path) -> tuple[str, list[str]]:
    """What is left of a run that died, in its folder, as the head of the command to go on with, and the command's end."""
    step = latest(run / "checkpoints")
    there = "there is no checkpoint, begin again" if step is None else f"a checkpoint of step {step} is there, go on"
    return there, ["run.resume=true"] if run_folder.is_begun(run) else []


@cache  # a resume asks several times, and a large checkpoint takes minutes to read
def _problem(checkpoint: Path, stamp: tuple[Any, ...]) -> str | None:
    """What is wrong with a checkpoint whose files have these names, sizes and times; None if it is whole."""
    try:
        check(checkpoint)
    except InputError as error:
        return str(error).removesuffix(TAKE_AWAY)
    return None


def _stamp(checkpoint: Path) -> tuple[Any, ...]:
    found = ((path.name, path.stat()) for path in sorted(checkpoint.iterdir()))
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)


def forget_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps."""
    for known in steps(folder):
        if known > step:
            delete(place_of(folder, known))


def check(checkpoint: Path) -> None:
    """Refuse a checkpoint that cannot be read, or of which a byte has changed since it was written.

    One of an earlier version, which wrote no digests, is read as far as that costs little: all but its tensors' values.

    Raises:
        InputError: a file of it is missing, cut off, changed or not what it should be.
    """
    state = _state(checkpoint)
    with _told(checkpoint):
        digests.check_files(checkpoint, state)
        for file in shards.files(checkpoint) or [checkpoint / WHOLE]:
            check_tensors(file)
        if (checkpoint / VERSIONS).exists():
            check_tensors(checkpoint / VERSIONS)
        for name in ("optimizer.pt", "random.pt"):
            with zipfile.ZipFile(checkpoint / name):  # which tells a file that is cut off
                pass
        _optimizer(checkpoint, mmap=True)
        _generators(checkpoint)


def check_tensors(file: Path) -> None:
    """Refuse a file that is not a whole safetensors file, by its header and its size.

    Raises:
        InputError: the file is cut off, or is not one.
    """
    try:
        with safe_open(file, "pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read ({error})") from error


def load_weights(checkpoint: Path, weights: Weights) -> int:
    """Put a checkpoint's trained tensors and their average in place; returns its step.

    Raises:
        InputError: they cannot be read, are of another run, or are not finite.
    """
    state = _state(checkpoint)
    with _told(checkpoint):
        weights.begin_at(state["updates"])
        _read_weights(checkpoint, weights.tensors(), _shapes(checkpoint))
    return state["step"]


def load_averaged(checkpoint: Path, weights: Weights) -> int:
    """Put what evaluation used, the average where one is kept, in the place of the trained tensors; returns the step.

    Raises:
        InputError: they cannot be read, are of another run, or are not finite.
    """
    state = _state(checkpoint)
    with _told(checkpoint):
        written = _shapes(checkpoint)
        kind = AVERAGE if any(name.startswith(AVERAGE) for name in written) else ""
        others = OTHER_POLICIES if kind else (AVERAGE, *OTHER_POLICIES)
        used = {name: shape for name, shape in written.items() if name.startswith(kind) and not name.startswith(others)}
        _read_weights(checkpoint, {f"{kind}{name}": p.detach() for name, p in weights.named.items()}, used)
    return state["step"]


def _shapes(checkpoint: Path) -> dict[str, torch.Size]:
    """The shapes of the tensors that `Weights.tensors` named."""
    if shards.files(checkpoint):
        every = shards.shapes(checkpoint)
        return {name.removeprefix(WEIGHTS): shape for name, shape in every.items() if name.startswith(WEIGHTS)}
    with safe_open(checkpoint / WHOLE, "pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@torch.no_grad()
def _read_weights(checkpoint: Path, tensors: Mapping[str, torch.Tensor], written: Mapping[str, torch.Size]) -> None:
    """Read weights into their tensors, one after the other, so that no second copy of a model is in memory.

    Args:
        tensors: that are to be read, by name.
        written: the shapes of those that there should be.
    """
    if {name: tensor.shape for name, tensor in tensors.items()} != written:
        raise InputError("the checkpoint's weights are not of this model and LoRA configuration")
    if shards.files(checkpoint):
        shards.read(checkpoint, {f"{WEIGHTS}{name}": tensor for name, tensor in tensors.items()})
    else:
        with safe_open(checkpoint / WHOLE, "pt") as file:
            for name, tensor in tensors.items():
                tensor.copy_(placed_as(file.get_tensor(name), tensor))
    if not all(bool(local(tensor).isfinite().all()) for tensor in tensors.values()):
        raise ValueError("its tensors are not finite, the run has diverged")


def rollout_state(checkpoint: Path) -> Any:
    """Return what rollouts depend on beside weights and prompt stats, None for nothing; InputError if it cannot be read."""
    return _state(checkpoint).get("rollout")


def own_state(checkpoint: Path) -> Any:
    """Return what else a resume goes on with (`Steps.own_state`), None for nothing; InputError if it cannot be read."""
    return _state(checkpoint).get("own")


def load(
    checkpoint: Path,
    *,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    versions: Versions | None = None,
    process: int = 0,
) -> tuple[int, float, dict[str, Any]]:
    """Put everything of a checkpoint in place; returns its step, coefficient of the divergence and prompt stats.

    Raises:
        InputError: it cannot be read, or is of another run.
    """
    state = _state(checkpoint)
    if "history" not in state:
        raise InputError(f"run.resume: {checkpoint} was written by an earlier version of flowgrpo, which kept less")
    step = load_weights(checkpoint, weights)
    with _told(checkpoint):
        # Each process keeps its part of a tensor in shards, so it need not have read the whole file.
        saved = _optimizer(checkpoint, mmap=any(isinstance(p, DTensor) for p in weights.parameters))
        moments = saved["optimizer"]["state"]
        for index, own in _moments(checkpoint, optimizers.parameters(optimizer)).items():
            moments[index] = {**moments.get(index, {}), **own}
        optimizers.restore(optimizer, saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        if versions is not None and versions.staleness:
            versions.load(*_versions(checkpoint, weights))
        states = _generators(checkpoint)
        if process < len(states):
            random_states.set_random_state(states[process])
    return step, state["beta"], state["history"]


def _state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of `state.json`; raises InputError where that is not what `snapshot` writes."""
    with _told(checkpoint):
        state = tables.document(checkpoint / digests.STATE)
        digests.check_state((checkpoint / digests.STATE).read_bytes(), state)
        history = state.get("history", {})
        numbers = [number for prompt, seen in history.items() for number in (int(prompt), *seen)]
        if len(numbers) != 4 * len(history):
            raise ValueError("its history is not of a count, a sum and an iteration for each prompt")
        if not all(map(is_number, (state["step"], state["updates"], state.get("beta", 0.0), *numbers))):
            raise ValueError("its state.json holds something else than numbers")
        if place_of(checkpoint.parent, state["step"]).name != checkpoint.name:
            raise ValueError(f"its state.json is of step {state['step']}")
        if not isinstance(state["updates"], int) or not isinstance(state.get("sound", True), bool):
            raise ValueError("its state.json holds no count of updates, or is sound neither true nor false")
    return state


def _optimizer(checkpoint: Path, mmap: bool = False) -> dict[str, Any]:
    """Return the content of `optimizer.pt`; with `mmap` its tensors are read when they are used."""
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True, map_location="cpu", mmap=mmap)
    if saved.keys() != {"optimizer", "scaler"} or saved["optimizer"].keys() != {"state", "param_groups"}:
        raise ValueError("its optimizer.pt holds no optimizer and scaler")
    return saved


def _moments(checkpoint: Path, parameters: Sequence[torch.nn.Parameter]) -> dict[int, dict[str, torch.Tensor]]:
    """Return the moments that lie in shards, by the number of their parameter and their name, placed as it is."""
    if not shards.files(checkpoint):
        return {}
    names = [name for name in shards.shapes(checkpoint) if name.startswith(MOMENTS)]
    places = {name: (int(number), key) for name in names for _, number, key in [name.split(".", 2)]}
    read = {name: torch.empty_like(parameters[number].detach()) for name, (number, _) in places.items()}
    shards.read(checkpoint, read)
    found: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, (number, key) in places.items():
        found[number][key] = read[name]
    return found


def _versions(checkpoint: Path, weights: Weights) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Return the weights of older versions by iteration and name, and their prompt stats by iteration."""
    if shards.files(checkpoint):
        stats = _state(checkpoint)["versions"]
        older = {i: {name: torch.empty_like(p.detach()) for name, p in weights.named.items()} for i in stats}
        shards.read(checkpoint, {f"{OLDER}{i}.{name}": t for i, own in older.items() for name, t in own.items()})
        return older, stats
    tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    with safe_open(checkpoint / VERSIONS, "pt") as file:
        for key in file.keys():  # noqa: SIM118, it is not a mapping
            iteration, _, name = key.partition(".")
            tensors[iteration][name] = file.get_tensor(key)
        return tensors, json.loads(file.metadata()["prompt_stats"])


def _generators(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the content of `random.pt`: `random_states.random_state()` of every process."""
    states = torch.load(checkpoint / "random.pt", weights_only=True, map_location="cpu")
    if not isinstance(states, list) or any(state.keys() != {"torch", "cuda", "numpy", "python"} for state in states):
        raise ValueError("its random.pt holds no states of generators")
    return states


@contextmanager
def _told(checkpoint: Path) -> Iterator[None]:
    """Turn whatever a damaged file raises, which may be anything, into an InputError of one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or is_lost(error):
            raise
        words = " ".join(str(error).split())[:160]
        raise InputError(f"{checkpoint} cannot be loaded ({type(error).__name__}: {words}){TAKE_AWAY}") from error


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints, and but the last `keep` that are sound.

    So a run that diverges does not push out the checkpoints from before it did.
    """
    every = steps(folder)
    kept = {*every[-keep:], *[old for old in every if is_sound(place_of(folder, old))][-keep:]}
    for old in every:
        if old not in kept:
            delete(place_of(folder, old))
