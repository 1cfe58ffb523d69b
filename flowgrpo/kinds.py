"""What each command calls for each kind of run and model: the one place that asks for the kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flowgrpo.flow import doctor, export, plan, sampling
from flowgrpo.flow import setup as flow
from flowgrpo.flow.certificate import Check
from flowgrpo.mdlm import doctor as text_doctor
from flowgrpo.mdlm import export as text_export
from flowgrpo.mdlm import plan as text_plan
from flowgrpo.mdlm import sampling as text_sampling
from flowgrpo.mdlm import setup as texts
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
    export: Callable[..., export.Exported]
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
