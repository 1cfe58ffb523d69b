"""Decisions about a resume: whether the run's folder is empty, has no checkpoint yet, or has checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flowgrpo.errors import InputError
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.reports import learning_signal
from flowgrpo.training.run import run_folder
from flowgrpo.training.run.run_files import read_metrics

AUTO = "auto"
# This file is in `checkpoints` from the start of a run until its first checkpoint is complete. If a run has iterations,
# but neither this file nor a checkpoint, its checkpoints were lost.
NONE_YET = ".none-yet"


def decide(asked: Literal["auto"] | bool, run: Path) -> bool:
    """Return whether a run resumes, by its `run.resume`. With `auto`, it does unless its folder is empty."""
    return not run_folder.is_empty(run) if asked == AUTO else bool(asked)


def mark_start(checkpoints: Path) -> None:
    """Record that a run has no checkpoint yet."""
    checkpoints.mkdir(exist_ok=True)
    (checkpoints / NONE_YET).touch()


def checkpoint_written(checkpoints: Path) -> None:
    """Delete the file that `mark_start` created; call this once a checkpoint is written."""
    (checkpoints / NONE_YET).unlink(missing_ok=True)


def describe_resume(step: int | None, iterations: int, lines: Sequence[Mapping[str, Any]]) -> str:
    """Describe from where a run of some `iterations` resumes, or how a finished one goes on.

    Without a checkpoint (`step` None), the iterations in the metric `lines` are run again.
    """
    if step is not None and step >= iterations:
        return f"run.resume: all {iterations} iterations are done; train.iterations={2 * step} goes on"
    if step is not None:
        return f"run.resume: goes on from the checkpoint of step {step}"
    done = _count_iterations(lines)
    dropped = f", whose {done} iterations are dropped and taken again" if done else ""
    return f"run.resume: begins at step 0, for an earlier attempt ended before its first checkpoint{dropped}"


def check_checkpoints(run: Path) -> None:
    """Raise InputError if the metrics hold iterations, but no checkpoint is left or all are damaged."""
    checkpoints = run / "checkpoints"
    if checkpoint.step_to_resume(checkpoints) is not None or (checkpoints / NONE_YET).exists():
        return
    if done := _count_iterations(read_metrics(run)):
        raise InputError(
            f"run.resume: {run / 'metrics.jsonl'} tells of {done} iterations, and no checkpoint is left in {checkpoints}; "
            "put a copy back, or begin again with another run.name"
        )


def is_finished(run: Path, *, iterations: int, patience: int | None) -> bool:
    """Return whether a run has done all its iterations, has not diverged, and has learnt something."""
    step, lines = checkpoint.step_to_resume(run / "checkpoints"), read_metrics(run)
    if step is None or step < iterations:
        return False
    return learning_signal.never_learnt(lines, patience) is None and learning_signal.broken(lines, patience) is None


def _count_iterations(lines: Sequence[Mapping[str, Any]]) -> int:
    return max((line["step"] for line in lines if line["phase"] == "train"), default=0)
