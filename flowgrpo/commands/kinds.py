"""What each command calls for each kind of run and model: the one place that asks for the kind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowgrpo.data import tables
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.model_files import folder_files
from flowgrpo.training.model_files.hub_files import HUB_ID, index_map, one_sentence
from rewards.base import nearest


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The modules of a kind, each imported by the command that uses it.

    Attributes:
        setup: `check_model`, what can be refused of a model by its folder; `check`, what can be refused without the model,
            before training; `trainer`, the loop with its model.
        plan: `plan`, the plan of a run, and `table`, its lines for people, and `drawn`, its picture; `reached`, the config
            of a run after a step.
        budget: `fit`, whether a run fits a GPU, `lines`, the same for people, and `budget_of`, the memory it takes.
        cost: `work`, what an iteration computes and sends.
        export: `check`, what can be refused of one without the model; `export`, a checkpoint's weights, written.
        sampling: `sampler`, a model that is ready to sample.
        doctor: `defaults`, the config, as one would write it, of a model alone; `examine`, the doctor's checks.
        engines: module of the package flowgrpo-engine: `check`, whether an engine can roll out for a run; `build`.
    """

    setup: Any
    plan: Any
    budget: Any
    cost: Any
    export: Any
    sampling: Any
    doctor: Any
    engines: str


KINDS = {
    "flow": Kind(
        setup=lazy("flowgrpo.flow.setup"),
        plan=lazy("flowgrpo.flow.planning.plan"),
        budget=lazy("flowgrpo.flow.planning.memory_budget"),
        cost=lazy("flowgrpo.flow.planning.iteration_cost"),
        export=lazy("flowgrpo.flow.outputs.export"),
        sampling=lazy("flowgrpo.flow.outputs.sampling"),
        doctor=lazy("flowgrpo.flow.diagnostics.doctor"),
        engines="flowgrpo_engine.flow.door",
    ),
    "mdlm": Kind(
        setup=lazy("flowgrpo.mdlm.setup"),
        plan=lazy("flowgrpo.mdlm.planning.plan"),
        budget=lazy("flowgrpo.mdlm.planning.memory_budget"),
        cost=lazy("flowgrpo.mdlm.planning.iteration_cost"),
        export=lazy("flowgrpo.mdlm.outputs.export"),
        sampling=lazy("flowgrpo.mdlm.outputs.sampling"),
        doctor=lazy("flowgrpo.mdlm.doctor"),
        engines="flowgrpo_engine.text.door",
    ),
}


def engines_of(settings: RunConfig) -> Any:
    """Return the module that opens `run.engine` for a run, None without one.

    Raises:
        InputError: the package flowgrpo-engine is not installed.
    """
    if settings.run.engine is None:
        return None
    if find_spec("flowgrpo_engine") is None:
        raise InputError("run.engine: it needs the package flowgrpo-engine: pip install ./engine")
    return import_module(KINDS[settings.kind].engines)


def kind_of(path: str) -> str:
    """The kind of a model, `flow` or `mdlm`, by what lies in its folder or at the hub.

    Raises:
        InputError: there is no such model.
    """
    if path in EMBEDDED:
        return EMBEDDED[path].kind
    folder_files.refuse_file(path)
    if Path(path).is_dir():
        return _kind_of_folder(Path(path))
    if not re.fullmatch(HUB_ID, path):
        raise InputError(
            f"model.path: there is no folder {path!r} and no built-in model of that name, {nearest(path, EMBEDDED)}"
        )
    from transformers.utils import cached_file

    unless = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with one_sentence(path):
        index = cached_file(path, "model_index.json", **unless)
        if index is None:
            cached_file(path, "config.json")  # refuses what is not a model
            return "mdlm"
        return _kind_of_pipeline(Path(index))


def _kind_of_folder(folder: Path) -> str:
    index, own = folder / "model_index.json", folder / "config.json"
    folder_files.refuse_empty(folder)
    for file in (index, own):
        folder_files.refuse_pointer(file)
    if index.is_file():
        with one_sentence(str(folder)):
            return _kind_of_pipeline(index)
    if not own.is_file():
        raise InputError(
            f"model.path: {folder} holds no model, neither a pipeline's model_index.json nor a config.json"
        )
    return "flow" if folder_files.is_network(folder) else "mdlm"  # a network alone is refused there


def _kind_of_pipeline(index: Path) -> str:
    from flowgrpo.mdlm.models.load import PIPELINE

    return "mdlm" if index_map(tables.document(index)).get("_class_name") == PIPELINE else "flow"
