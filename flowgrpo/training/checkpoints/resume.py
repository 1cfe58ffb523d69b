"""What a run's folder holds for a resume: no run yet, one without a checkpoint so far, or one with checkpoints."""

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
# In `checkpoints`, from before the first iteration until the first checkpoint is complete. A run that has taken iterations
# and holds neither has lost its checkpoints.
NONE_YET = ".none-yet"


def decide(asked: Literal["auto"] | bool, run: Path) -> bool:
    """Whether a run goes on with what is in its folder, and does not begin there.

    `auto` does unless the folder is empty, but for what a run leaves that is killed as it begins.

    Args:
        asked: `run.resume`.
        run: the folder, which need not be there.
    """
    return not run_folder.is_empty(run) if asked == AUTO else bool(asked)


def mark_start(checkpoints: Path) -> None:
    """Note, before the first iteration, that a run has no checkpoint yet; `checkpoint_written` takes the note away."""
    checkpoints.mkdir(exist_ok=True)
    (checkpoints / NONE_YET).touch()


def checkpoint_written(checkpoints: Path) -> None:
    """Note that a run has a checkpoint."""
    (checkpoints / NONE_YET).unlink(missing_ok=True)


def found(step: int | None, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentence that says where a resume goes on, and what it drops if that is the start.

    Args:
        step: of the checkpoint; None without one.
        lines: metric lines of the run so far.
    """
    if step is not None:
        return f"run.resume: goes on from the checkpoint of step {step}"
    done = _iterations(lines)
    dropped = f", whose {done} iterations are dropped and taken again" if done else ""
    return f"run.resume: begins at step 0, for an earlier attempt ended before its first checkpoint{dropped}"


def check_checkpoints(run: Path) -> None:
    """Refuse a run that has lost its checkpoints, and one of which none is whole.

    Raises:
        InputError: the metrics tell of iterations, a checkpoint had been written, and there is none; or see `chosen`.
    """
    checkpoints = run / "checkpoints"
    if checkpoint.chosen(checkpoints).step is not None or (checkpoints / NONE_YET).exists():
        return
    if done := _iterations(read_metrics(run)):
        raise InputError(
            f"run.resume: {run / 'metrics.jsonl'} tells of {done} iterations, and no checkpoint is left in {checkpoints}; "
            "put a copy back, or begin again with another run.name"
        )


def is_finished(run: Path, *, iterations: int, patience: int | None) -> bool:
    """Whether a run has taken all its iterations, and ended well.

    Args:
        iterations, patience: of its configuration.
    """
    step, lines = checkpoint.resumed(run / "checkpoints"), read_metrics(run)
    if step is None or step < iterations:
        return False
    return learning_signal.never_learnt(lines, patience) is None and learning_signal.broken(lines, patience) is None


def _iterations(lines: Sequence[Mapping[str, Any]]) -> int:
    return max((line["step"] for line in lines if line["phase"] == "train"), default=0)
