"""Reading, verification and choice of checkpoints; `snapshot` writes them.

A checkpoint is a folder such as `step-000010`, complete or absent:
 - `weights.safetensors`: trained tensors, average and other policies
 - `versions.safetensors`: weights of earlier iterations, with `run.staleness`
 - `shard-*.safetensors`: with sharded weights, replace these two files; also hold moments; each process writes its own
 - `rollout.safetensors`: tensors that rollouts depend on, with hints
 - `optimizer.pt`: optimizer and loss scaler
 - `random.pt`: global random states, which only plug-ins use
 - `state.json`: step, KL coefficient, prompt statistics and other small state, and a digest of each file
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
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.training.checkpoints import digests, shards
from flowgrpo.training.distributed.dtensors import local, shard_like
from flowgrpo.training.run import random_states, run_folder
from flowgrpo.training.run.run_files import is_number
from flowgrpo.training.run.stop_reasons import is_lost
from flowgrpo.training.weights import optimizers
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import AVERAGE, OTHER_POLICIES, Weights
from rewards.memory import is_out_of_memory

WHOLE = "weights.safetensors"
VERSIONS = "versions.safetensors"
ROLLOUT = "rollout.safetensors"
# Prefixes of tensor names in shards: trained tensors by name, moments by parameter index, older versions by iteration.
WEIGHTS, MOMENTS, OLDER = "weights.", "moments.", "versions."
TAKE_AWAY = "; take it away to go on from the one before"


def is_sound(checkpoint: Path) -> bool:
    """Return whether a checkpoint can be trusted: readable, and not of a run that had diverged (`learning_signal`)."""
    try:
        return _read_state(checkpoint).get("sound", True)
    except InputError:
        return False


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a partial one never looks whole."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden)


def place_of(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return folder / f"step-{step:06d}"


def steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in `folder`, whole or damaged, ascending."""
    names = (path.name for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{6,9}", name, re.ASCII))


def find(folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint of `step`, or the latest; raise InputError if there is none."""
    known = steps(folder)
    if not known:
        raise InputError(f"{folder}: there is no checkpoint yet; continue the run with run.resume=true")
    if step is not None and step not in known:
        raise InputError(f"{folder}: there is no checkpoint of step {step}, there are {', '.join(map(str, known))}")
    return place_of(folder, known[-1] if step is None else step)


@dataclass(frozen=True)
class Choice:
    """The step to resume from (None without a checkpoint), and a sentence on each damaged later checkpoint."""

    step: int | None
    damaged: list[str]

    @property
    def warning(self) -> str | None:
        """A warning about the damaged checkpoints, or None."""
        return f"{'; '.join(self.damaged)}; the run goes on from step {self.step}" if self.damaged else None


def choose(folder: Path) -> Choice:
    """Choose the latest undamaged checkpoint, a sound one if there is any. Raises InputError if all are damaged."""
    damaged, unsound = [], None
    for step in reversed(steps(folder)):
        place = place_of(folder, step)
        stats = ((path.name, path.stat()) for path in sorted(place.iterdir()))
        stamp = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
        problem = _find_problem(place, stamp)
        if problem is not None:
            damaged.append(problem)
        elif is_sound(place):
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


def step_to_resume(folder: Path) -> int | None:
    """Return the step to resume from, or None; see `choose`."""
    return choose(folder).step


def latest(folder: Path) -> int | None:
    """Return the step of the latest sound checkpoint, or else of the latest one, or else None. Reads only `state.json`."""
    known = steps(folder)
    return next((step for step in reversed(known) if is_sound(place_of(folder, step))), known[-1] if known else None)


def describe_rest(folder: Path, done: int) -> str:
    """Describe from where a run that stops after `done` iterations resumes. The command to resume follows this phrase."""
    step = latest(folder)
    if step is None:
        return "there is no checkpoint, begin again"
    if step < done:
        which = "the last that was sound" if is_sound(place_of(folder, step)) else "the last"
        return f"go on from step {step}, {which},"
    return "a checkpoint is written, go on"


def way_on(run: Path) -> tuple[str, list[str]]:
    """Describe the checkpoint that a dead run left; also return the arguments that its command needs to resume."""
    step = latest(run / "checkpoints")
    there = "there is no checkpoint, begin again" if step is None else f"a checkpoint of step {step} is there, go on"
    return there, ["run.resume=true"] if run_folder.is_begun(run) else []


@cache  # a resume asks several times, and a large checkpoint takes minutes to read
def _find_problem(checkpoint: Path, stamp: tuple[Any, ...]) -> str | None:
    """Return what is wrong with a checkpoint, or None. `stamp` makes the cache notice changed files."""
    try:
        check(checkpoint)
    except InputError as error:
        return str(error).removesuffix(TAKE_AWAY)
    return None


def forget_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of steps after `step`."""
    for known in steps(folder):
        if known > step:
            delete(place_of(folder, known))


def check(checkpoint: Path) -> None:
    """Raise InputError if a file of a checkpoint is missing, truncated, changed or of another kind.

    A checkpoint of an earlier version of this program may lack digests; then the values of tensors are not checked.
    """
    state = _read_state(checkpoint)
    with _one_sentence(checkpoint):
        digests.check_files(checkpoint, state)
        for file in shards.files(checkpoint) or [checkpoint / WHOLE]:
            _check_tensors(file)
        if (checkpoint / VERSIONS).exists():
            _check_tensors(checkpoint / VERSIONS)
        for name in ("optimizer.pt", "random.pt"):
            zipfile.ZipFile(checkpoint / name).close()  # raises for a truncated file
        _read_optimizer(checkpoint, mmap=True)
        _read_random_states(checkpoint)


def _check_tensors(file: Path) -> None:
    try:
        with safe_open(file, "pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read ({error})") from error


def load_weights(checkpoint: Path, weights: Weights) -> int:
    """Load trained tensors, their average and other policies into `weights`; return the step. Raises as `load_averaged`."""
    state = _read_state(checkpoint)
    with _one_sentence(checkpoint):
        weights.begin_at(state["updates"])
        _read_weights(checkpoint, weights.tensors(), _read_shapes(checkpoint))
    return state["step"]


def load_averaged(checkpoint: Path, weights: Weights) -> int:
    """Load the weights that evaluation used (the average if there is one) into the trained tensors; return the step.

    Raises:
        InputError: the weights are unreadable, of another model, or not finite.
    """
    state = _read_state(checkpoint)
    with _one_sentence(checkpoint):
        shapes = _read_shapes(checkpoint)
        kind = AVERAGE if any(name.startswith(AVERAGE) for name in shapes) else ""
        others = OTHER_POLICIES if kind else (AVERAGE, *OTHER_POLICIES)
        used = {name: shape for name, shape in shapes.items() if name.startswith(kind) and not name.startswith(others)}
        _read_weights(checkpoint, {f"{kind}{name}": p.detach() for name, p in weights.named.items()}, used)
    return state["step"]


def _read_shapes(checkpoint: Path) -> dict[str, torch.Size]:
    """Return the unsharded shapes of the stored weights, by their names in `Weights.tensors`."""
    if shards.files(checkpoint):
        every = shards.shapes(checkpoint)
        return {name.removeprefix(WEIGHTS): shape for name, shape in every.items() if name.startswith(WEIGHTS)}
    with safe_open(checkpoint / WHOLE, "pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@torch.no_grad()
def _read_weights(checkpoint: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Read a checkpoint's weights into `tensors`, one at a time, so that memory never holds a second model."""
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise InputError("the checkpoint's weights are not of this model and LoRA configuration")
    if shards.files(checkpoint):
        shards.read(checkpoint, {f"{WEIGHTS}{name}": tensor for name, tensor in tensors.items()})
    else:
        with safe_open(checkpoint / WHOLE, "pt") as file:
            for name, tensor in tensors.items():
                tensor.copy_(shard_like(file.get_tensor(name), tensor))
    if not all(bool(local(tensor).isfinite().all()) for tensor in tensors.values()):
        raise ValueError("its tensors are not finite, the run has diverged")


def rollout_state(checkpoint: Path) -> Any:
    """Return the result of `Wing.rollout_state` in a checkpoint, or None; raise InputError if it is unreadable."""
    return _read_state(checkpoint).get("rollout")


def rollout_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the result of `RolloutMemory.state` in a checkpoint, {} if it has none; raise InputError if unreadable."""
    path = checkpoint / ROLLOUT
    with _one_sentence(checkpoint):
        return load_file(path) if path.exists() else {}


def baseline_memory(checkpoint: Path) -> list[float]:
    """Return what the baseline remembered of all rewards, see `RunState.memory`; raise InputError if it is unreadable."""
    return _read_state(checkpoint).get("memory", [])


def own_state(checkpoint: Path) -> Any:
    """Return the result of `KeptGraphs.state` in a checkpoint, or None; raise InputError if it is unreadable."""
    return _read_state(checkpoint).get("own")


def load(
    checkpoint: Path,
    *,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    versions: Versions | None = None,
    process: int = 0,
) -> tuple[int, float, dict[str, Any]]:
    """Load all of a checkpoint, with the random states of process number `process`. Raises as `load_averaged`.

    Returns:
        The step, the coefficient of the KL term, and the prompt statistics.
    """
    state = _read_state(checkpoint)
    if "history" not in state:
        raise InputError(f"run.resume: {checkpoint} was written by an earlier version of flowgrpo, which kept less")
    step = load_weights(checkpoint, weights)
    with _one_sentence(checkpoint):
        # With sharding each process needs only its part of the moments, so the file is mapped, not read.
        saved = _read_optimizer(checkpoint, mmap=any(isinstance(p, DTensor) for p in weights.parameters))
        moments = saved["optimizer"]["state"]
        for index, sharded in _read_moments(checkpoint, optimizers.parameters(optimizer)).items():
            moments[index] = {**moments.get(index, {}), **sharded}
        optimizers.restore(optimizer, saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        if versions is not None and versions.staleness:
            versions.load(*_read_versions(checkpoint, weights))
        states = _read_random_states(checkpoint)
        if process < len(states):
            random_states.set_random_state(states[process])
    return step, state["beta"], state["history"]


def _read_state(checkpoint: Path) -> dict[str, Any]:
    """Read and validate `state.json`; raise InputError if `snapshot` cannot have written it."""
    with _one_sentence(checkpoint):
        state = tables.document(checkpoint / digests.STATE)
        digests.check_state((checkpoint / digests.STATE).read_bytes(), state)
        history = {**state.get("history", {})}
        numbers = history.pop("odometer", [0.0])  # see `PromptStats.state`
        if len(numbers) != 1:
            raise ValueError("its history has no single sum of log ratios")
        numbers = [*numbers, *(number for prompt, stats in history.items() for number in (int(prompt), *stats))]
        if any(len(stats) not in (3, 4) for stats in history.values()):  # earlier versions kept no squares
            raise ValueError("its history is not of a count, a sum, an iteration and a square for each prompt")
        if not all(
            map(
                is_number, (state["step"], state["updates"], state.get("beta", 0.0), *state.get("memory", []), *numbers)
            )
        ):
            raise ValueError("its state.json holds something else than numbers")
        if place_of(checkpoint.parent, state["step"]).name != checkpoint.name:
            raise ValueError(f"its state.json is of step {state['step']}")
        if not isinstance(state["updates"], int) or not isinstance(state.get("sound", True), bool):
            raise ValueError("its state.json holds no count of updates, or is sound neither true nor false")
    return state


def _read_optimizer(checkpoint: Path, mmap: bool) -> dict[str, Any]:
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True, map_location="cpu", mmap=mmap)
    if saved.keys() != {"optimizer", "scaler"} or saved["optimizer"].keys() != {"state", "param_groups"}:
        raise ValueError("its optimizer.pt holds no optimizer and scaler")
    return saved


def _read_moments(checkpoint: Path, parameters: Sequence[torch.nn.Parameter]) -> dict[int, dict[str, torch.Tensor]]:
    """Read sharded optimizer moments, by parameter index and moment name; each is sharded like its parameter."""
    moments: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    if not shards.files(checkpoint):
        return moments
    targets = {}
    for name in shards.shapes(checkpoint):
        if name.startswith(MOMENTS):
            _, number, key = name.split(".", 2)
            targets[name] = moments[int(number)][key] = torch.empty_like(parameters[int(number)].detach())
    shards.read(checkpoint, targets)
    return moments


def _read_versions(checkpoint: Path, weights: Weights) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Read the weights of earlier iterations, by iteration and name, and their prompt statistics by iteration."""
    if shards.files(checkpoint):
        stats = _read_state(checkpoint)["versions"]
        older = {i: {name: torch.empty_like(p.detach()) for name, p in weights.named.items()} for i in stats}
        shards.read(checkpoint, {f"{OLDER}{i}.{name}": t for i, own in older.items() for name, t in own.items()})
        return older, stats
    tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    with safe_open(checkpoint / VERSIONS, "pt") as file:
        for key in file.keys():  # noqa: SIM118, it is not a mapping
            iteration, _, name = key.partition(".")
            tensors[iteration][name] = file.get_tensor(key)
        return tensors, json.loads(file.metadata()["prompt_stats"])


def _read_random_states(checkpoint: Path) -> list[dict[str, Any]]:
    states = torch.load(checkpoint / "random.pt", weights_only=True, map_location="cpu")
    if not isinstance(states, list) or any(state.keys() != {"torch", "cuda", "numpy", "python"} for state in states):
        raise ValueError("its random.pt holds no states of generators")
    return states


@contextmanager
def _one_sentence(checkpoint: Path) -> Iterator[None]:
    """Turn any exception that a damaged file causes into an InputError of one sentence."""
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
    """Delete all but the last `keep` checkpoints and the last `keep` sound ones, which a diverging run must not lose."""
    every = steps(folder)
    kept = {*every[-keep:], *[old for old in every if is_sound(place_of(folder, old))][-keep:]}
    for old in every:
        if old not in kept:
            delete(place_of(folder, old))
