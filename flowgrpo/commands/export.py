"""`flowgrpo export`: open a run and a checkpoint of it, and write its weights."""

from __future__ import annotations

from pathlib import Path

from flowgrpo import config
from flowgrpo.commands.kinds import KINDS
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training import checkpoint, folders
from flowgrpo.training.card import Exported


def export(run: Path, out: Path, step: int | None = None) -> Exported:
    """Write the weights that evaluation used (the average, when one is kept) of a run's checkpoint to `out`.

    Args:
        step: the checkpoint's; by default the last.

    Raises:
        InputError: there is no such run or checkpoint, it cannot be read, or `out` is not empty or cannot be written to.
    """
    settings, folder = opened(run, out, step)
    return KINDS[settings.kind].export.export(settings, run, folder, out)


def opened(run: Path, out: Path, step: int | None) -> tuple[RunConfig, Path]:
    """Return the configuration of a run and the checkpoint that is to be exported.

    Raises:
        InputError: there is no such run or checkpoint, it cannot be read, or `out` is not empty or cannot be written to.
    """
    settings = config.of_run(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists and is not an empty folder")
    folders.check_writable(out, "--out")
    folder = checkpoint.find(run / "checkpoints", step)
    checkpoint.check(folder)
    return settings, folder
