"""Experiment trackers of accelerate: their start, their resume, and pictures of evaluations."""

from __future__ import annotations

import inspect
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from PIL import Image

from flowgrpo.errors import InputError
from flowgrpo.schema.saving import Tracker
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.reports.report import place
from flowgrpo.training.reports.samples import Sample
from flowgrpo.training.run.run_folder import replace_text
from rewards.audio import Films, tensors
from rewards.base import nearest

FILE = "trackers.json"  # file in the run's folder with the ids of the trackers' runs
# For each tracker, its argument names for our options; a missing option is not supported.
ARGUMENTS = {
    "wandb": {"name": "name", "entity": "entity", "tags": "tags"},
    "swanlab": {"name": "experiment_name", "entity": "workspace", "tags": "tags"},
    "trackio": {"name": "name"},
    "mlflow": {"name": "run_name"},
    "clearml": {"name": "task_name", "tags": "tags"},
    "comet_ml": {"entity": "workspace"},
}
NESTED = ("wandb", "swanlab", "trackio")  # trackers that accept a nested config
FRAMES = 3  # number of frames of a video that are shown side by side
PLACE = "eval/samples"


def check(trackers: Mapping[str, Tracker]) -> None:
    """Raise InputError if a tracker is unknown, is not installed, does not support an option, or needs a login."""
    installed = {kind.value for kind in get_available_trackers()}
    for name, use in trackers.items():
        if name not in LOGGER_TYPE_TO_CLASS:
            raise InputError(f"run.trackers: there is no tracker {name!r}, {nearest(name, LOGGER_TYPE_TO_CLASS)}")
        if name not in installed:
            way = "pip install 'flowgrpo[wandb]'" if name == "wandb" else "install it"
            raise InputError(f"run.trackers: {name} is not installed here, {way} or remove it")
        for option in ("name", "entity", "tags"):
            if getattr(use, option) and option not in ARGUMENTS.get(name, {}):
                takers = ", ".join(other for other, takes in ARGUMENTS.items() if option in takes)
                raise InputError(f"run.trackers.{name}.{option}: {name} takes none, only {takers} do; leave it out")
    if "wandb" in trackers:
        _check_login()


def _check_login() -> None:
    """Raise InputError if wandb has no login, since it would prompt for a key only after the model is loaded."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters and not wandb.login(prompt=False):
        raise InputError(
            "run.trackers.wandb: nobody is logged in; run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline"
        )


def start(accelerator: Accelerator, settings: RunConfig, folder: Path, done: int) -> None:
    """Start the trackers on the main process, and log the config; raise InputError if one cannot be started.

    A run resumed after `done` iterations continues the trackers' runs, whose ids are stored in `folder`.
    """
    if not accelerator.is_main_process or not settings.run.trackers:
        return
    file = folder / FILE
    begun = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    values = settings.model_dump(mode="json")
    for name, use in settings.run.trackers.items():
        kind, known = LOGGER_TYPE_TO_CLASS[name], begun.get(name)
        options = _options(name, use, settings.run.name) | _resume_arguments(name, known, folder, done)
        places = [str(folder)] if kind.requires_logging_directory else []
        try:
            tracker = kind(use.project, *places, **options)
            tracker.start()
            if name in NESTED or known is None:
                tracker.store_init_configuration(values if name in NESTED else _flatten(values))
        except Exception as error:
            words = " ".join(str(error).split())[:300]
            raise InputError(
                f"run.trackers.{name}: it could not be started ({type(error).__name__}: {words}); the run's folder is made, "
                "so go on with run.resume=true"
            ) from error
        accelerator.trackers.append(tracker)
        begun[name] = {"id": options.get("id")}
        replace_text(file, json.dumps(begun, indent=1) + "\n")


def finish(accelerator: Accelerator, together: bool = True) -> None:
    """Finish the trackers. With `together`, all processes wait until the trackers have sent their data."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []
    if together:
        accelerator.wait_for_everyone()


def _options(name: str, use: Tracker, run: str) -> dict[str, Any]:
    written = {"name": use.name or run, "entity": use.entity, "tags": use.tags}
    return {called: written[key] for key, called in ARGUMENTS.get(name, {}).items() if written[key]}


def _resume_arguments(name: str, begun: Mapping[str, Any] | None, folder: Path, done: int) -> dict[str, Any]:
    if name == "wandb":
        known = (begun or {}).get("id") or secrets.token_hex(4)
        return {"id": known, "resume": "allow", "dir": str(folder)}
    if name == "trackio":
        return {"resume": "never" if begun is None else "allow"}
    if name == "tensorboard" and begun is not None:
        return {"purge_step": done + 1}
    return {}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return flat


def log_pictures(accelerator: Accelerator, samples: Sequence[Sample], step: int, newest: int) -> None:
    """Log pictures of an evaluation to the trackers that support pictures; of a video, a few frames side by side."""
    if not accelerator.is_main_process:
        return
    visible = [(s.row.prompt, tensors(s.decoded)[0]) for s in samples if isinstance(s.decoded, torch.Tensor | Films)]
    shown = [(prompt, _picture(decoded)) for prompt, decoded in visible if decoded.ndim in (3, 4)]
    for tracker in accelerator.trackers if shown else ():
        _log(tracker, shown, step, newest)


def _log(tracker: GeneralTracker, shown: Sequence[tuple[str, np.ndarray]], step: int, newest: int) -> None:
    if tracker.name == "tensorboard":
        for index, (_, picture) in enumerate(shown):
            tracker.writer.add_image(f"{PLACE}/{index:02d}", picture, step, dataformats="HWC")
        tracker.writer.flush()
    elif tracker.name in NESTED:
        picture_of = import_module(tracker.name).Image
        pictures = [picture_of(Image.fromarray(picture), caption=prompt) for prompt, picture in shown]
        if tracker.name == "trackio":  # it keeps only one picture per name
            tracker.log({f"{PLACE}/{index:02d}": picture for index, picture in enumerate(pictures)}, step=step)
        else:
            tracker.log({PLACE: pictures}, **place(tracker, step, newest))


def _picture(decoded: torch.Tensor) -> np.ndarray:
    """Return an image (3, H, W), or frames of a video (F, 3, H, W) side by side, as uint8 (H, W, 3)."""
    if decoded.ndim == 4:
        chosen = np.unique(np.linspace(0, len(decoded) - 1, FRAMES).round().astype(int)).tolist()
        decoded = torch.cat([decoded[index] for index in chosen], dim=2)
    return decoded.mul(255).round().clamp(0, 255).byte().movedim(0, 2).cpu().numpy()
