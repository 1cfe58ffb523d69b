"""The files of a trained controller; this module imports no torch, so that a config is checked fast."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.errors import InputError
from rewards.base import nearest

SIZES, WEIGHTS = "controller.json", "controller.safetensors"


def check_there(folder: Path, place: str) -> None:
    """Raise InputError, naming the dotted key `place`, for a folder without a controller."""
    if not (folder / SIZES).is_file():
        others = [str(found.parent) for found in folder.parent.glob(f"*/{SIZES}")]
        hint = nearest(str(folder), others) if others else "flowgrpo mdlm tracelock writes one"
        raise InputError(f"{place}: there is no trained controller in {folder}, {hint}")
