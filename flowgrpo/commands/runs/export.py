"""`flowgrpo export`: open a run and a checkpoint of it, and write its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flowgrpo import config
from flowgrpo.commands.runs import push
from flowgrpo.commands.kinds import KINDS
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.reports.model_card import Exported
from flowgrpo.training.run import run_folder


def export(
    run: Path,
    out: Path,
    step: int | None = None,
    *,
    comfyui: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
) -> Exported:
    """Write the weights that evaluation used (the average, when one is kept) of a run's checkpoint to `out`.

    Args:
        step: the checkpoint's; by default the last.
        comfyui: write a LoRA for ComfyUI as well.
        push_to_hub: upload the folder to this repository, OWNER/NAME, at the model hub; `private` when it is made.

    Raises:
        InputError: there is no such run or checkpoint, it cannot be read, `out` is not empty or cannot be written to,
            ComfyUI's names of the trained layers are not known, its model or evaluation prompts are not there, or the hub
            takes nothing there from this user. Nothing is written, and no repository is made at the hub.
        UploadFailed: everything is written, and the upload failed.
    """
    settings, folder = opened(run, out, step)
    if private and push_to_hub is None:
        raise InputError("--private: it is for --push-to-hub")
    exporter = KINDS[settings.kind].export
    exporter.check(settings, run, folder, comfyui=comfyui)
    if push_to_hub is not None:  # last, for it makes the repository
        push.open_repository(push_to_hub, private=private)
    done = exporter.export(settings, run, folder, out, comfyui=comfyui)
    if push_to_hub is None:
        return done
    return replace(done, url=push.upload(done.folder, push_to_hub, f"{settings.run.name}, step {done.step}"))


def opened(run: Path, out: Path, step: int | None) -> tuple[RunConfig, Path]:
    """Return the configuration of a run and the checkpoint that is to be exported.

    Raises:
        InputError: there is no such run or checkpoint, it cannot be read, or `out` is not empty or cannot be written to.
    """
    settings = config.of_run(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists and is not an empty folder")
    run_folder.check_writable(out, "--out")
    folder = checkpoint.find(run / "checkpoints", step)
    checkpoint.check(folder)
    return settings, folder
