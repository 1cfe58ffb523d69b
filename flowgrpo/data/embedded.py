"""Embedded models: names of models in this package, and the calls that come with models."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowgrpo.errors import InputError

Kind = Literal["flow", "mdlm"]


@dataclass(frozen=True)
class Embedded:
    """An embedded model: its kind, its files, default arguments of the pipeline's call, and the reward of its captions."""

    kind: Kind
    folder: Path
    call: dict[str, Any] = field(default_factory=dict)
    reward: str = ""


FOLDER = Path(__file__).parents[1] / "models"
SAMPLER = "sampler.json"  # the file of an export that has the arguments of its call
CALL = {"num_inference_steps": 10, "guidance_scale": 1.0, "height": 64, "width": 64, "max_sequence_length": 1}
CLIPS_CALL = {
    "num_inference_steps": 10,
    "guidance_scale": 1.0,
    "height": 48,
    "width": 48,
    "num_frames": 9,
    "max_sequence_length": 12,
}
EMBEDDED = {
    "shapes": Embedded("flow", FOLDER / "shapes", CALL, "shapes"),
    "shapes4": Embedded("flow", FOLDER / "shapes4", {**CALL, "num_inference_steps": 4}, "shapes"),
    "patterns": Embedded("flow", FOLDER / "patterns", {**CALL, "num_inference_steps": 24}, "patterns"),
    "clips": Embedded("flow", FOLDER / "clips", CLIPS_CALL, "moves"),
    "digits": Embedded("mdlm", FOLDER / "digits"),
}


def names(kind: Kind) -> list[str]:
    """Return the embedded models of a kind."""
    return [name for name, model in EMBEDDED.items() if model.kind == kind]


def place_of(path: str) -> str:
    """Return the folder of an embedded model, or any other path unchanged."""
    return str(EMBEDDED[path].folder) if path in EMBEDDED else path


def default_call(path: str) -> dict[str, Any]:
    """Return the default arguments of a model's call: those of an embedded model, or of the run that exported a folder.

    Empty for other models. Raise InputError if the folder's `sampler.json` has no call.
    """
    if path in EMBEDDED:
        return EMBEDDED[path].call
    file = Path(path, SAMPLER)
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["call"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file}: it has no `call`, a map of arguments as `flowgrpo export` writes it; export the model again"
        ) from error
