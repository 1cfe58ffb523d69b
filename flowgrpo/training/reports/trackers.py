"""Trackers: services and programs that get a run's numbers, its config, and the pictures of its evaluations.

They are accelerate's; here is what each is told at its start, and how a resumed run goes on in the one that it began.
"""

from __future__ import annotations

import inspect
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from PIL import Image

from flowgrpo.errors import InputError
from flowgrpo.schema.kept import Tracker
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.reports.report import place
from flowgrpo.training.reports.samples import Sample
from flowgrpo.training.run.run_folder import replace_text
from rewards.base import nearest

FILE = "trackers.json"  # in the run's folder: the runs that were begun there
# How a tracker's own start calls what a config says; what is not here, it does not take.
ARGUMENTS = {
    "wandb": {"name": "name", "entity": "entity", "tags": "tags"},
    "swanlab": {"name": "experiment_name", "entity": "workspace", "tags": "tags"},
    "trackio": {"name": "name"},
    "mlflow": {"name": "run_name"},
    "clearml": {"name": "task_name", "tags": "tags"},
    "comet_ml": {"entity": "workspace"},
}
NESTED = ("wandb", "swanlab", "trackio")  # they take a config as the tree that it is
FRAMES = 3  # of a video, side by side: the first, the last and those between
PLACE = "eval/samples"


def check(trackers: Mapping[str, Tracker]) -> None:
    """Refuse, before a model is loaded, a tracker that accelerate would drop with a mere warning or that could not start.

    Raises:
        InputError: there is no such tracker, it is not installed, does not take an option, or nobody is logged in.
    """
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
    """Refuse a run of wandb that would stop to ask for a key once the model is loaded."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters and not wandb.login(prompt=False):
        raise InputError(
            "run.trackers.wandb: nobody is logged in; run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline"
        )


def start(accelerator: Accelerator, settings: RunConfig, folder: Path, done: int) -> None:
    """Start the config's trackers on the main process and hand them the config; a resumed run goes on where it was.

    Args:
        folder: the run's, where the names that the trackers gave it are kept.
        done: iterations so far; what was logged after them is dropped, where a tracker can.

    Raises:
        InputError: a tracker cannot be started.
    """
    if not accelerator.is_main_process or not settings.run.trackers:
        return
    file = folder / FILE
    begun = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    values = settings.model_dump(mode="json")
    for name, use in settings.run.trackers.items():
        kind, known = LOGGER_TYPE_TO_CLASS[name], begun.get(name)
        options = _options(name, use, settings.run.name) | _continuation(name, known, folder, done)
        places = [str(folder)] if kind.requires_logging_directory else []
        try:
            tracker = kind(use.project, *places, **options)
            tracker.start()
            if name in NESTED or known is None:
                tracker.store_init_configuration(values if name in NESTED else _flat(values))
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
    """End the trackers, some of which send what they have left, while the other processes wait.

    Args:
        together: whether all processes are there.
    """
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []
    if together:
        accelerator.wait_for_everyone()


def _options(name: str, use: Tracker, run: str) -> dict[str, Any]:
    written = {"name": use.name or run, "entity": use.entity, "tags": use.tags}
    return {called: written[key] for key, called in ARGUMENTS.get(name, {}).items() if written[key]}


def _continuation(name: str, begun: Mapping[str, Any] | None, folder: Path, done: int) -> dict[str, Any]:
    """What tells a tracker that a run goes on."""
    if name == "wandb":
        known = (begun or {}).get("id") or secrets.token_hex(4)
        return {"id": known, "resume": "allow", "dir": str(folder)}
    if name == "trackio":
        return {"resume": "never" if begun is None else "allow"}
    if name == "tensorboard" and begun is not None:
        return {"purge_step": done + 1}
    return {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config as a table of dotted keys with numbers and texts; what is neither is a text."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return found


def log_pictures(accelerator: Accelerator, samples: Sequence[Sample], step: int, newest: int) -> None:
    """Hand the trackers that show pictures those of an evaluation; of a video a few frames side by side.

    Args:
        step: of the evaluation.
        newest: step that trackers have something of.
    """
    if not accelerator.is_main_process:
        return
    shown = [(s.row.prompt, _picture(s.decoded)) for s in samples if _is_visible(s.decoded)]
    for tracker in accelerator.trackers if shown else ():
        _log(tracker, shown, step, newest)


def _log(tracker: GeneralTracker, shown: Sequence[tuple[str, np.ndarray]], step: int, newest: int) -> None:
    if tracker.name == "tensorboard":
        for index, (_, picture) in enumerate(shown):
            tracker.writer.add_image(f"{PLACE}/{index:02d}", picture, step, dataformats="HWC")
        tracker.writer.flush()
    elif tracker.name in ("wandb", "swanlab", "trackio"):
        if tracker.name == "wandb":
            from wandb import Image as Shown
        elif tracker.name == "swanlab":
            from swanlab import Image as Shown
        else:
            from trackio import Image as Shown
        pictures = [Shown(Image.fromarray(picture), caption=prompt) for prompt, picture in shown]
        if tracker.name == "trackio":  # of one name it keeps one
            tracker.log({f"{PLACE}/{index:02d}": picture for index, picture in enumerate(pictures)}, step=step)
        else:
            tracker.log({PLACE: pictures}, **place(tracker, step, newest))


def _is_visible(decoded: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(decoded, torch.Tensor) and decoded.ndim in (3, 4)


def _picture(decoded: torch.Tensor) -> np.ndarray:
    """A picture (3, H, W), or some frames of a video (F, 3, H, W) beside each other, as uint8 (H, W, 3)."""
    if decoded.ndim == 4:
        chosen = np.unique(np.linspace(0, len(decoded) - 1, FRAMES).round().astype(int)).tolist()
        decoded = torch.cat([decoded[index] for index in chosen], dim=2)
    return decoded.mul(255).round().clamp(0, 255).byte().movedim(0, 2).cpu().numpy()
