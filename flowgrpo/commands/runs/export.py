"""`flowgrpo export`: write the weights of a run's checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flowgrpo import config
from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.commands.runs import push
from flowgrpo.errors import InputError
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
    """Write the evaluated weights (the average, if one is kept) of a checkpoint, by default the last, to `out`.

    `comfyui` writes a LoRA for ComfyUI as well. `push_to_hub` uploads the folder to the repository OWNER/NAME of the model
    hub. A missing repository is created, as a `private` one if that is set.

    Raises:
        InputError: the run or `out` cannot be used, ComfyUI has no names for the trained layers, the model or the evaluation
            prompts are missing, or the hub refuses this user. Nothing is written, and no repository is made.
        UploadFailed: the folder is complete, but its upload failed.
    """
    settings = config.of_run(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists and is not an empty folder")
    run_folder.check_writable(out, "--out")
    folder = checkpoint.find(run / "checkpoints", step)
    checkpoint.check(folder)
    if private and push_to_hub is None:
        raise InputError("--private: it is for --push-to-hub")
    exporter = KINDS[settings.kind].export
    exporter.check(settings, run, folder, comfyui=comfyui)
    if push_to_hub is not None:  # after all other checks, because it creates the repository
        push.open_repository(push_to_hub, private=private)
    done = exporter.export(settings, run, folder, out, comfyui=comfyui)
    _share(done.folder)
    if push_to_hub is not None:
        done = replace(done, url=push.upload(done.folder, push_to_hub, f"{settings.run.name}, step {done.step}"))
    return done


def _share(folder: Path) -> None:
    """Give all files the mode of the card, as the user's umask sets it; safetensors lets only their owner read its files."""
    mode = (folder / "README.md").stat().st_mode & 0o777
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)
