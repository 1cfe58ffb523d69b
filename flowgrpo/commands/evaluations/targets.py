"""What is evaluated: a model, a config's model, a run's checkpoint, or the folder of an evaluation that is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowgrpo import config
from flowgrpo.commands.evaluations.results import is_evaluation
from flowgrpo.commands.model_kinds import KINDS, kind_of
from flowgrpo.commands.samples.sampling import is_config
from flowgrpo.data import configs
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.reports.samples import Sampler


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to evaluate, or in `done` the folder of an evaluation; `found` is a checkpoint of `run`."""

    name: str
    done: Path | None = None
    settings: RunConfig | None = None
    run: Path | None = None
    found: Path | None = None

    @property
    def model(self) -> RunConfig:
        """The config of a model that is evaluated."""
        assert self.settings is not None
        return self.settings

    def describe(self) -> dict[str, Any]:
        """Return what determines the samples, for JSON: the model, its call, and the weights."""
        use = asdict(KINDS[self.model.kind].sampling.use_of(self.model))
        del use["switches"]  # of memory and speed
        local = [self.found] if self.found else [Path(path) for path in (use["path"], use["adapter"]) if _is_path(path)]
        weights = {"run": str(self.run), "checkpoint": self.found.name} if self.run and self.found else {}
        return {"model": use, **weights, "files": _digest(local)}

    def sampler(self, rows: Sequence[Row]) -> Sampler:
        """Load the model and return its sampler; raise InputError if that is not possible."""
        sampling = KINDS[self.model.kind].sampling
        if self.run is None:
            return sampling.sampler(sampling.use_of(self.model), rows)
        return sampling.run_sampler(self.model, self.run, self.found, rows)


def _is_path(path: Any) -> bool:
    return isinstance(path, str) and Path(path).exists()


def _digest(places: Sequence[Path]) -> str:
    """Return a digest of the names, sizes and times of the files in some places."""
    digest = hashlib.sha256()
    for place in places:
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file():
                stat = file.stat()
                digest.update(json.dumps([file.name, stat.st_size, stat.st_mtime_ns]).encode())
    return digest.hexdigest()[:16]


def find_target(word: str, overrides: Sequence[str], step: int | None) -> Target:
    """Return what a word names; overrides are keys of its config. Raise InputError if there is no such thing."""
    folder = Path(word)
    if is_evaluation(folder):
        return Target(name=folder.resolve().name, done=folder)
    if (folder / "config.yaml").is_file():
        settings = config.apply_override(config.of_run(folder).model_dump(), overrides)
        found = checkpoint.find(folder / "checkpoints", step)
        checkpoint.check(found)
        name = f"{folder.resolve().name}-{found.name}"
        return Target(name=name, settings=settings, run=folder, found=found)
    if step is not None:
        raise InputError(f"--step: it is a run's, and {word} is none")
    if is_config(word):
        return Target(name=configs.place_of(word).stem, settings=config.load(word, overrides))
    settings = config.apply_override(KINDS[kind_of(word)].doctor.defaults(word), overrides)
    return Target(name=folder.resolve().name, settings=settings)
