"""Checks of a run's folder before anything is loaded: it is free, or it holds the run that a config goes on with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowgrpo import config
from flowgrpo.commands import launch
from flowgrpo.data import config_paths, tables
from flowgrpo.errors import InputError
from flowgrpo.schema import sections
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.readable import counted
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.checkpoints import resume
from flowgrpo.training.run import run_folder

if TYPE_CHECKING:
    from flowgrpo.commands.inspect import gallery
else:  # a new run needs no pages
    gallery = lazy("flowgrpo.commands.inspect.gallery")

MAY_DIFFER = (  # prefixes of the keys that a resumed run may change
    "train.iterations",
    "eval.",
    "eval_rewards",
    *(
        f"model.{key}"
        for key in (
            "cuda_graphs",
            "gradient_checkpointing",
            "offload_activations",
            "vae",
            "vae_tiling",
            "text_encoders",
        )
    ),
    *(f"run.{key}" for key in sections.Run.model_fields if key not in ("seed", "staleness")),
    "train.micro_batch",  # batch sizes, for a run that ran out of memory; results differ by rounding
    "train.rollout_batch",
    "train.replay",
)
PRESET = "algorithm.preset"


def decide_resume(settings: RunConfig) -> RunConfig:
    """Resolve `run.resume`: `auto` is true if the folder is not empty, and false becomes true after a torchrun restart."""
    folder = settings.run.folder
    if settings.run.resume is not False or not run_folder.is_begun(folder):
        return with_resume(settings, resume.decide(settings.run.resume, folder))
    place = folder / "environment.json"
    environment = tables.document(place) if place.is_file() else {}
    begun_by = environment.get("torchrun") if isinstance(environment, dict) else None
    return with_resume(settings, launch.is_restarted(begun_by))


def with_resume(settings: RunConfig, resumes: bool) -> RunConfig:
    """Return a config with another `run.resume`."""
    return settings.model_copy(update={"run": settings.run.model_copy(update={"resume": resumes})})


def check(settings: RunConfig) -> None:
    """Refuse to overwrite a run, and to resume one that is missing, damaged, or has other settings.

    `run.resume` is resolved, see `decide_resume`. Raises InputError.
    """
    folder = settings.run.folder
    if not settings.run.resume:
        if not run_folder.is_empty(folder):
            raise InputError(
                f"run.name: {folder} exists already; set run.resume=true to continue it, or another run.name"
            )
        return
    if run_folder.is_empty(folder):
        raise InputError(
            f"run.resume: there is no run in {folder} yet; run.resume=auto starts one there, and continues it later"
        )
    if not run_folder.is_begun(folder):
        raise InputError(
            f"run.resume: {folder} is not the folder of a run, it holds no {run_folder.CONFIG}; take another run.name"
        )
    found = changes(settings)
    for key, (before, now) in found.items():
        others = f" (and {counted(len(found) - 1, 'other key')})" if len(found) > 1 else ""
        raise InputError(
            f"run.resume: {key} was {_word(before)} in {folder} and is {_word(now)} now{others}; a resumed run cannot "
            f"change it, so take another run.name for a new run, or go on with: flowgrpo train {folder / run_folder.CONFIG} "
            "run.resume=true"
        )
    gallery.check_readable(folder)
    resume.check_checkpoints(folder)


def changes(settings: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the values of a run in its folder and of a config, by dotted key, where they differ and a resume refuses it.

    Another preset stands for all that it changes in `algorithm`. Raises InputError if the run's config cannot be read.
    """
    folder = settings.run.folder
    before, now = _flat(config.of_run(folder, resolve=False).model_dump()), _flat(settings.model_dump())
    places_before, places_now = (
        _flat(config_paths.absolute(each.model_dump())) for each in (config.of_run(folder), settings)
    )
    found = {
        key: (before.get(key), now.get(key))
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and places_before.get(key) != places_now.get(key)
        if not key.startswith(MAY_DIFFER)
    }
    for some, others in ((before, now), (now, before)):  # a section that one of them lacks stands for its keys
        for section in [key for key, value in some.items() if value is None]:
            start = f"{section}."
            if inner := {key.removeprefix(start): others[key] for key in found if key.startswith(start)}:
                found = {key: values for key, values in found.items() if not key.startswith(start)}
                found[section] = (None, inner) if some is before else (inner, None)
    found = dict(sorted(found.items()))
    if PRESET in found:
        found = {key: values for key, values in found.items() if key == PRESET or not key.startswith("algorithm.")}
    return found


def _word(value: Any) -> str:
    return "null" if value is None else repr(value)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, list) and any(isinstance(value, dict) for value in values):
        values = {str(place): value for place, value in enumerate(values)}
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {k: v for name, inner in values.items() for k, v in _flat(inner, f"{prefix}.{name}".lstrip(".")).items()}
