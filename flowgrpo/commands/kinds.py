"""What each command calls for each kind of run and model: the one place that asks for the kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from flowgrpo.errors import InputError, nearest
from flowgrpo.flow import doctor, export, plan, sampling
from flowgrpo.flow import setup as flow
from flowgrpo.flow.pipeline.loading import explained
from flowgrpo.mdlm import doctor as text_doctor
from flowgrpo.mdlm import export as text_export
from flowgrpo.mdlm import plan as text_plan
from flowgrpo.mdlm import sampling as text_sampling
from flowgrpo.mdlm import setup as texts
from flowgrpo.mdlm.loading import BUILT_IN as TEXT_MODELS
from flowgrpo.mdlm.loading import PIPELINE
from flowgrpo.shapes import BUILT_IN
from flowgrpo.training import card
from flowgrpo.training.checks import Check
from flowgrpo.training.hub import HUB_ID
from flowgrpo.training.loop import Loop


@dataclass(frozen=True)
class Kind:
    """The functions of a kind.

    Attributes:
        check: what can be refused without the model, before training.
        trainer: the loop with its model.
        plan: the plan of a run.
        table: its lines for people.
        export: the weights of a run, written.
        sample: samples of a model, written.
        defaults: the configuration that `examine` takes for a model alone.
        examine: the doctor's checks.
    """

    check: Callable[..., None]
    trainer: Callable[..., Loop]
    plan: Callable[..., dict[str, Any]]
    table: Callable[[dict[str, Any]], list[tuple[str, str]]]
    export: Callable[..., card.Exported]
    sample: Callable[..., list[dict[str, Any]]]
    defaults: Callable[[str], Any]
    examine: Callable[..., Iterator[Check]]


KINDS = {
    "flow": Kind(
        flow.check,
        flow.trainer,
        plan.plan,
        plan.table,
        export.export,
        sampling.sample_to_folder,
        doctor.defaults,
        doctor.examine,
    ),
    "mdlm": Kind(
        texts.check,
        texts.trainer,
        text_plan.plan,
        text_plan.table,
        text_export.export,
        text_sampling.sample_to_folder,
        text_doctor.defaults,
        text_doctor.examine,
    ),
}


def kind_of(path: str) -> str:
    """The kind of a model, `flow` or `mdlm`, by what lies in its folder or at the hub.

    Raises:
        InputError: there is no such model.
    """
    if path in BUILT_IN or path in TEXT_MODELS:
        return "flow" if path in BUILT_IN else "mdlm"
    if not Path(path).is_dir() and not re.fullmatch(HUB_ID, path):
        known = [*BUILT_IN, *TEXT_MODELS]
        raise InputError(
            f"model.path: there is no folder {path!r} and no built-in model of that name, {nearest(path, known)}"
        )
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in ("model_index.json", "config.json")):
        raise InputError(f"model.path: {path} holds no model, neither a pipeline's model_index.json nor a config.json")
    unless = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with explained(path):
        index = cached_file(path, "model_index.json", **unless)
        if index is None:
            cached_file(path, "config.json")  # refuses what is no model
            return "mdlm"
        return "mdlm" if json.loads(Path(index).read_text()).get("_class_name") == PIPELINE else "flow"
