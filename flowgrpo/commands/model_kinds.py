"""The two kinds of runs and models, `flow` and `mdlm`: their modules, and the detection of a model's kind."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowgrpo import config
from flowgrpo.data import run_folders, tables
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.model_files import folder_files
from flowgrpo.training.model_files.hub_files import HUB_ID, index_map, one_sentence
from rewards.base import nearest


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Modules of a kind, each imported when a command first uses it."""

    setup: Any  # `check_model` and `check` refuse wrong input, `trainer` builds the training loop
    plan: Any  # `plan` plans a run, `table` and `format_tree` show it, `config_at_step` returns the config after a step
    budget: Any  # `budget_of` measures the memory of a run, `fit` compares it with a GPU
    cost: Any  # `work` counts what an iteration computes and sends
    export: Any  # `check` refuses wrong input, `export` writes a checkpoint's weights
    sampling: Any  # `sampler` loads a model that is ready to sample
    doctor: Any  # `defaults` returns the config of a model alone, `examine` runs the checks
    engines: str  # of flowgrpo-engine: `check` refuses a run, `greet` contacts the servers, `build` returns a client


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


def load_engines(settings: RunConfig) -> Any:
    """Return the module that opens `run.engine`, None without one; raise InputError if its package is missing."""
    if settings.run.engine is None:
        return None
    if find_spec("flowgrpo_engine") is None:
        raise InputError("run.engine: it needs the package flowgrpo-engine: pip install ./engine")
    return import_module(KINDS[settings.kind].engines)


def detect_kind(path: str, others: Iterable[str] = ()) -> str:
    """Return `flow` or `mdlm` for a built-in model, a model folder or a hub id.

    Raises InputError for something else, with the nearest of these and `others`.
    """
    if path in EMBEDDED:
        return EMBEDDED[path].kind
    folder_files.refuse_file(path)
    if Path(path).is_dir():
        return _kind_of_folder(Path(path))
    if not re.fullmatch(HUB_ID, path):
        near = nearest(path, [*EMBEDDED, *others])
        raise InputError(f"model.path: there is no folder {path!r} and no built-in model of that name, {near}")
    from transformers.utils import cached_file

    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with one_sentence(path):
        index = cached_file(path, "model_index.json", **optional)
        if index is None:
            cached_file(path, "config.json")  # raises for a repository without a model
            return "mdlm"
        return _kind_of_pipeline(Path(index))


def kind_of(word: str) -> str:
    """Return the kind of a model; raise InputError if there is none, with the nearest model, run or config."""
    return detect_kind(word, [*run_folders.similar(Path(word)), *config.similar(Path(word))])


def _kind_of_folder(folder: Path) -> str:
    index, network = folder / "model_index.json", folder / "config.json"
    folder_files.refuse_non_model(folder)
    for file in (index, network):
        folder_files.refuse_pointer(file)
    if index.is_file():
        with one_sentence(str(folder)):
            return _kind_of_pipeline(index)
    if not network.is_file():
        raise InputError(
            f"model.path: {folder} holds no model, neither a pipeline's model_index.json nor a config.json"
        )
    return "flow" if folder_files.is_network(folder) else "mdlm"  # a flow network alone is refused later


def _kind_of_pipeline(index: Path) -> str:
    from flowgrpo.mdlm.models.load import PIPELINE

    return "mdlm" if index_map(tables.document(index)).get("_class_name") == PIPELINE else "flow"
