"""The weights of a run, written."""

from __future__ import annotations

from pathlib import Path

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.training import checkpoint, folders


def settings_of(run: Path) -> config.AnyConfig:
    """The configuration of a run.

    Raises:
        InputError: there is no such run.
    """
    if not (run / "config.yaml").is_file():
        raise InputError(f"{run}: there is no run here, a run's folder holds config.yaml")
    return config.load(run / "config.yaml")


def opened(run: Path, out: Path, step: int | None) -> tuple[config.AnyConfig, Path]:
    """The configuration of a run and the checkpoint that is to be exported.

    Raises:
        InputError: there is no such run or checkpoint, it cannot be read, or `out` is not empty or cannot be written to.
    """
    settings = settings_of(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists and is not an empty folder")
    found = checkpoint.find(run / "checkpoints", step)
    checkpoint.check(found)
    folders.check_writable(out, "--out")
    return settings, found
