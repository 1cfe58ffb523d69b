"""What a checkpoint is to hold, copied to the host at its step, and written beside the steps that follow.

A checkpoint is written under a temporary name and renamed, so that it is complete or absent. What is whole the first process
writes, of what lies in shards each its own.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowgrpo.training.checkpoints import checkpoint, digests, resume, shards
from flowgrpo.training.checkpoints.checkpoint import MOMENTS, OLDER, VERSIONS, WEIGHTS, WHOLE
from flowgrpo.training.distributed.agreement import Peers
from flowgrpo.training.run.background import Background
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import Weights

ALONE = Peers()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the checkpoint of a step will hold of this process; see `take`.

    Attributes:
        state: of `state.json`, without digests and whether it is sound.
        optimizer: with the loss scaler, without what lies in shards.
        weights, older: whole tensors by name, those of older versions by iteration and name.
        older_stats: the prompt stats of those, by iteration.
        shards: this process's parts, by names that say what they are; if there are some, `weights` and `older` are empty.
    """

    state: dict[str, Any]
    optimizer: dict[str, Any]
    random_states: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    older: dict[str, torch.Tensor]
    older_stats: dict[str, Any]
    shards: dict[str, torch.Tensor]


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
    rollout: Any = None,
    own: Any = None,
    first: bool = True,
) -> Snapshot:
    """Copy what the checkpoint of a step is to hold to the host; what is trained may change from here on.

    Args:
        random_states: `random_states.random_state()` of every process.
        beta: coefficient of the divergence, which may adapt.
        prompt_stats: what is remembered of each prompt, as JSON; `history` in the file.
        versions: by which later iterations are rolled out.
        rollout: what rollouts depend on beside these, as JSON; None for nothing, which is not written.
        own: what a resume goes on with beside that, likewise.
        first: whether this is the process that writes what is whole; the others copy their shards alone.
    """
    trained, moments = weights.tensors(), optimizer.state_dict()
    moments["state"] = {number: dict(own) for number, own in moments["state"].items()}  # the optimizer keeps its own
    older, older_stats = {}, {}
    if versions is not None:
        older = {f"{i}.{name}": t for i, own in versions.tensors().items() for name, t in own.items()}
        older_stats = {str(i): version.prompt_stats for i, version in versions.kept.items()}
    state = {"step": step, "updates": weights.updates, "beta": beta, "history": prompt_stats}
    if rollout is not None:
        state["rollout"] = copy.deepcopy(rollout)  # it is written while the run goes on
    if own is not None:
        state["own"] = copy.deepcopy(own)
    parts: dict[str, torch.Tensor] = {}
    if shards.any_in(trained.values()):
        parts = {f"{WEIGHTS}{name}": t for name, t in trained.items()}
        parts |= {f"{OLDER}{name}": t for name, t in older.items()}
        parts |= _cut_out(moments["state"])
        trained, older = {}, {}
        state["versions"] = older_stats
    whole = {"optimizer": {"optimizer": moments, "scaler": scaler.state_dict()}, "weights": trained, "older": older}
    return Snapshot(
        state=state,
        random_states=random_states,
        older_stats=older_stats,
        shards=_copied(parts),
        **(_copied(whole) if first else {key: {} for key in whole}),
    )


def _cut_out(moments: dict[int, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Take what lies in shards out of a copy of an optimizer's state, and return it by its name in a checkpoint."""
    found = {}
    for number, own in moments.items():
        for key in [key for key, value in own.items() if shards.any_in([value])]:
            found[f"{MOMENTS}{number}.{key}"] = own.pop(key)
    return found


def _copied(value: Any) -> Any:
    """A nest of values with its tensors on the host; there, too, they are copies, for the trained ones go on to change."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, torch.Tensor) else value


def write(
    folder: Path, snapshot: Snapshot, *, keep: int, sound: Callable[[], bool] = lambda: True, peers: Peers = ALONE
) -> Path:
    """Write the checkpoint of a snapshot, and delete earlier ones; see `checkpoint.prune`.

    Args:
        folder: the run's `checkpoints`.
        sound: asked when all else is written: whether the weights can be trusted (`training.reports.learning_signal`).
        peers: the processes that write it; all of them take part, and where one fails all do.
    """
    target = checkpoint.place_of(folder, snapshot.state["step"])
    partial = folder / f".{target.name}.partial"
    try:
        peers.together(lambda: _begin(folder, partial) if peers.first else None)
        if snapshot.shards:
            shards.write(partial, snapshot.shards, peers)
        found = peers.together(lambda: _written(partial, snapshot, peers))
        files = {name: digest for own in found for name, digest in own.items()}
        state = snapshot.state
        peers.together(lambda: _end(partial, target, state | {"sound": sound()}, files) if peers.first else None)
        peers.together(lambda: checkpoint.prune(folder, keep) if peers.first else None)
    except BaseException:  # of a full disk, above all: what is half written takes the room that others need
        if peers.first and partial.exists():
            shutil.rmtree(partial)
        raise
    return target


class Writer:
    """Writes a run's checkpoints in the background, one at a time: each has a copy on the host of all that is trained.

    Args:
        folder: the run's `checkpoints`.
        peers: see `write`.
    """

    def __init__(self, folder: Path, background: Background, *, keep: int, peers: Peers):
        self.peers = peers
        self._folder, self._background, self._keep = folder, background, keep
        self._last: Future[None] | None = None

    def begin(self, snapshot: Snapshot, sound: Callable[[], bool]) -> None:
        """Begin to write a checkpoint; `wait` must have been called since the one before. See `write`."""
        job = partial(write, self._folder, snapshot, keep=self._keep, sound=sound, peers=self.peers)
        self._last = self._background.submit(job)

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            Exception: it could not be written, or what was to be written before it.
        """
        if self._last is not None:
            self._background.wait(self._last)


def _begin(folder: Path, partial: Path) -> None:
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)


def _written(partial: Path, snapshot: Snapshot, peers: Peers) -> dict[str, str]:
    """Write what is whole, if this process does, and return the digests of the files that it has written."""
    if peers.first:
        _write_whole(partial, snapshot)
    elif not snapshot.shards:  # the folder may be one that this process does not see
        return {}
    paths = [path for path in partial.iterdir() if shards.writer(path) == peers.rank]
    for path in paths:
        _flush(path)
    return digests.of_files(paths)


def _write_whole(partial: Path, snapshot: Snapshot) -> None:
    if not snapshot.shards:
        save_file(snapshot.weights, partial / WHOLE)
    if snapshot.older:
        stats = {"prompt_stats": json.dumps(snapshot.older_stats)}
        save_file(snapshot.older, partial / VERSIONS, metadata=stats)
    _write(partial / "optimizer.pt", snapshot.optimizer)
    _write(partial / "random.pt", snapshot.random_states)


def _write(path: Path, content: Any) -> None:
    with path.open("wb") as file:  # of a path, torch would not say why it cannot write
        torch.save(content, file)


def _end(partial: Path, target: Path, state: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Seal a checkpoint of which all other files are written, and give it its name."""
    sealed = partial / digests.STATE
    sealed.write_text(digests.sealed(state, files))
    _flush(sealed)
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
