"""Snapshots: copies of a checkpoint's content in host memory, which are written while training continues.

A checkpoint is written under a temporary name and renamed, so that it is complete or absent. The first process writes
whole tensors; each process writes its own shards.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from flowgrpo.training.checkpoints import checkpoint, digests, resume, shards
from flowgrpo.training.checkpoints.checkpoint import MOMENTS, OLDER, ROLLOUT, VERSIONS, WEIGHTS, WHOLE
from flowgrpo.training.distributed.agreement import Peers
from flowgrpo.training.run.background import Background
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import Weights

ALONE = Peers()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The part of a step's checkpoint that this process writes; see `take`."""

    state: dict[str, Any]  # `state.json` without `sound` and digests
    optimizer: dict[str, Any]  # with the loss scaler
    random_states: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]  # empty if they are sharded
    older: dict[str, torch.Tensor]  # weights of earlier iterations by `ITERATION.NAME`; empty if they are sharded
    older_stats: dict[str, Any]  # prompt statistics of these iterations, by iteration
    rollout: dict[str, torch.Tensor]  # result of `RolloutMemory.state`
    shards: dict[str, torch.Tensor]  # sharded tensors and moments; names have the prefixes of `checkpoint`


def take(
    step: int,
    *,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    random_states: list[dict[str, Any]],
    beta: float,
    prompt_stats: dict[str, Any],
    versions: Versions | None = None,
    memory: Sequence[float] = (),
    rollout: Any = None,
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
    own: Any = None,
    first: bool = True,
) -> Snapshot:
    """Copy the content of a checkpoint to host memory, so that training may continue.

    Args:
        random_states: results of `random_states.random_state`, one per process.
        beta: coefficient of the KL term, which may adapt.
        prompt_stats: the key `history` of `state.json`.
        versions: weights of earlier iterations, for rollouts with `run.staleness`.
        memory: what the baseline remembers of all rewards; an empty one is not written.
        rollout: result of `Wing.rollout_state`; None is not written.
        tensors: result of `RolloutMemory.state`; empty ones are not written.
        own: result of `KeptGraphs.state`; None is not written.
        first: whether this process writes whole tensors. Other processes copy only their shards.
    """
    trained, moments = weights.tensors(), optimizer.state_dict()
    moments["state"] = {number: dict(values) for number, values in moments["state"].items()}  # copies
    older, older_stats = {}, {}
    if versions is not None:
        older = {f"{i}.{name}": t for i, tensors in versions.tensors().items() for name, t in tensors.items()}
        older_stats = {str(i): version.prompt_stats for i, version in versions.kept.items()}
    state = {"step": step, "updates": weights.updates, "beta": beta, "history": prompt_stats}
    state |= {"memory": list(memory)} if memory else {}
    # Copies, because the run may change them while they are written.
    state |= {key: copy.deepcopy(value) for key, value in (("rollout", rollout), ("own", own)) if value is not None}
    parts: dict[str, torch.Tensor] = {}
    if shards.any_in(trained.values()):
        parts = {f"{WEIGHTS}{name}": t for name, t in trained.items()}
        parts |= {f"{OLDER}{name}": t for name, t in older.items()}
        parts |= _pop_sharded(moments["state"])
        trained, older = {}, {}
        state["versions"] = older_stats
    whole = {"optimizer": {"optimizer": moments, "scaler": scaler.state_dict()}, "weights": trained, "older": older}
    whole["rollout"] = tensors
    return Snapshot(
        state=state,
        random_states=random_states,
        older_stats=older_stats,
        shards=_copy_to_host(parts),
        **(_copy_to_host(whole) if first else {key: {} for key in whole}),
    )


def _pop_sharded(moments: dict[int, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Remove the sharded tensors from the state of an optimizer; return them by their names in a checkpoint."""
    sharded = {}
    for number, values in moments.items():
        for key in [key for key, value in values.items() if shards.any_in([value])]:
            sharded[f"{MOMENTS}{number}.{key}"] = values.pop(key)
    return sharded


def _copy_to_host(value: Any) -> Any:
    """Copy nested maps and lists. Tensors in host memory are copied too, since training changes them."""
    if isinstance(value, Mapping):
        return {key: _copy_to_host(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copy_to_host(each) for each in value]
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, torch.Tensor) else value


def write(
    folder: Path, snapshot: Snapshot, *, keep: int, sound: Callable[[], bool] = lambda: True, peers: Peers = ALONE
) -> Path:
    """Write a snapshot as a checkpoint, and delete earlier ones; see `checkpoint.prune`.

    Args:
        folder: the run's `checkpoints`.
        sound: returns whether the weights can be trusted (`training.reports.learning_signal`); called last.
        peers: all processes that write; if one fails, all fail.
    """
    target = checkpoint.place_of(folder, snapshot.state["step"])
    partial = folder / f".{target.name}.partial"

    def do_once(job: Callable[[], None]) -> None:
        peers.together(lambda: job() if peers.first else None)

    try:
        do_once(lambda: _begin(folder, partial))
        if snapshot.shards:
            shards.write(partial, snapshot.shards, peers)
        digests_of_ranks = peers.together(lambda: _write_own(partial, snapshot, peers))
        files = {name: digest for digests_of_rank in digests_of_ranks for name, digest in digests_of_rank.items()}
        do_once(lambda: _end(partial, target, snapshot.state | {"sound": sound()}, files))
        do_once(lambda: checkpoint.prune(folder, keep))
    except BaseException:  # most often a full disk; delete the partial checkpoint to free it
        if peers.first and partial.exists():
            shutil.rmtree(partial)
        raise
    return target


class Writer:
    """Writer of a run's checkpoints, one at a time, since each holds a copy of all trained tensors in host memory."""

    def __init__(self, folder: Path, background: Background, *, keep: int, peers: Peers):
        self.peers = peers
        self._folder, self._background, self._keep = folder, background, keep
        self._last: Future[None] | None = None

    def begin(self, snapshot: Snapshot, sound: Callable[[], bool]) -> None:
        """Start to write a checkpoint; see `write`. Call `wait` before the next one."""
        job = partial(write, self._folder, snapshot, keep=self._keep, sound=sound, peers=self.peers)
        self._last = self._background.submit(job)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise the error of this or an earlier background job."""
        if self._last is not None:
            self._background.wait(self._last)


def _begin(folder: Path, partial: Path) -> None:
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)


def _write_own(partial: Path, snapshot: Snapshot, peers: Peers) -> dict[str, str]:
    """Write whole tensors if this is the first process; return the digests of all files that this process wrote."""
    if peers.first:
        _write_whole(partial, snapshot)
    elif not snapshot.shards:  # this process may not see the folder
        return {}
    paths = [path for path in partial.iterdir() if shards.writer(path) == peers.rank]
    for path in paths:
        _flush(path)
    return digests.hash_files(paths)


def _write_whole(partial: Path, snapshot: Snapshot) -> None:
    if not snapshot.shards:
        save_file(snapshot.weights, partial / WHOLE)
    if snapshot.older:
        stats = {"prompt_stats": json.dumps(snapshot.older_stats)}
        save_file(snapshot.older, partial / VERSIONS, metadata=stats)
    if snapshot.rollout:
        save_file(snapshot.rollout, partial / ROLLOUT)
    _write(partial / "optimizer.pt", snapshot.optimizer)
    _write(partial / "random.pt", snapshot.random_states)


def _write(path: Path, content: Any) -> None:
    with path.open("wb") as file:  # with a path instead, torch's error would not say why it cannot write
        torch.save(content, file)


def _end(partial: Path, target: Path, state: Mapping[str, Any], files: Mapping[str, str]) -> None:
    state_file = partial / digests.STATE
    state_file.write_text(digests.seal(state, files))
    _flush(state_file)
    _flush(partial)
    if target.exists():
        checkpoint.delete(target)
    os.replace(partial, target)
    resume.checkpoint_written(target.parent)
    _flush(target.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
