"""What each command calls for each kind of run and model: the one place that asks for the kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from flowgrpo.data import tables
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.errors import InputError, nearest
from flowgrpo.flow import doctor, export, plan, sampling
from flowgrpo.flow import setup as flow
from flowgrpo.mdlm import doctor as text_doctor
from flowgrpo.mdlm import export as text_export
from flowgrpo.mdlm import plan as text_plan
from flowgrpo.mdlm import sampling as text_sampling
from flowgrpo.mdlm import setup as texts
from flowgrpo.mdlm.loading import PIPELINE
from flowgrpo.training import card
from flowgrpo.training.checks import Check
from flowgrpo.training.hub import HUB_ID, explained, index_map
from flowgrpo.training.loop import Loop
from flowgrpo.training.samples import Sampler


@dataclass(frozen=True)
class Kind:
    """The functions of a kind.

    Attributes:
        check: what can be refused without the model, before training.
        trainer: the loop with its model.
        plan: the plan of a run.
        table: its lines for people.
        export: a checkpoint's weights, written.
        sampler: a model that is ready to sample.
        defaults: the config, as one would write it, of a model alone.
        examine: the doctor's checks.
    """

    check: Callable[..., None]
    trainer: Callable[..., Loop]
    plan: Callable[..., dict[str, Any]]
    table: Callable[[dict[str, Any]], list[tuple[str, str]]]
    export: Callable[..., card.Exported]
    sampler: Callable[..., Sampler]
    defaults: Callable[[str], dict[str, Any]]
    examine: Callable[..., Iterator[Check]]


KINDS = {
    "flow": Kind(
        flow.check,
        flow.trainer,
        plan.plan,
        plan.table,
        export.export,
        sampling.sampler,
        doctor.defaults,
        doctor.examine,
    ),
    "mdlm": Kind(
        texts.check,
        texts.trainer,
        text_plan.plan,
        text_plan.table,
        text_export.export,
        text_sampling.sampler,
        text_doctor.defaults,
        text_doctor.examine,
    ),
}


def kind_of(path: str) -> str:
    """The kind of a model, `flow` or `mdlm`, by what lies in its folder or at the hub.

    Raises:
        InputError: there is no such model.
    """
    if path in EMBEDDED:
        return EMBEDDED[path].kind
    if not Path(path).is_dir() and not re.fullmatch(HUB_ID, path):
        raise InputError(
            f"model.path: there is no folder {path!r} and no built-in model of that name, {nearest(path, EMBEDDED)}"
        )
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in ("model_index.json", "config.json")):
        raise InputError(f"model.path: {path} holds no model, neither a pipeline's model_index.json nor a config.json")
    unless = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with explained(path):
        index = cached_file(path, "model_index.json", **unless)
        if index is None:
            cached_file(path, "config.json")  # refuses what is no model
            return "mdlm"
        return "mdlm" if index_map(tables.document(Path(index))).get("_class_name") == PIPELINE else "flow"
