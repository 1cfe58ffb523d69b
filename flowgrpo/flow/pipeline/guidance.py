"""Branches of guidance, and switching them off."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.errors import InputError

if TYPE_CHECKING:
    from flowgrpo.data.prompts import Row
    from flowgrpo.flow.pipeline.policy import DiffusersPolicy, Policy


# What switches a guidance argument of diffusers' pipelines off; None leaves it out of the call.
OFF = {
    "true_cfg_scale": 1.0,
    "guidance_scale": 1.0,
    "guidance_scale_2": None,
    "audio_guidance_scale": 1.0,
    "img_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "pag_scale": 0.0,
    "negative_prompt": None,
}


def unguided(pipeline: type, embedded: bool = False) -> dict[str, Any]:
    """The call arguments that switch a pipeline's guidance off, None for one to be left out.

    Args:
        pipeline: the class.
        embedded: whether `guidance_scale` is an input of its transformer (guidance-distilled models); it stays as it is.
    """
    takes = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    off = {name: value for name, value in OFF.items() if name in takes}
    declared = getattr(pipeline, "do_classifier_free_guidance", None)
    if embedded or ("true_cfg_scale" in takes and declared is None):
        off.pop("guidance_scale", None)
    elif isinstance(declared, property):
        try:
            if declared.fget(SimpleNamespace(_guidance_scale=1.0, guidance_scale=1.0)):
                off["guidance_scale"] = 0.0  # pipelines that add guidance_scale * (cond - uncond) to cond
        except AttributeError:  # it reads more of the pipeline than its scale
            pass
    return off


def training_call(guidance: str, policy: Policy) -> dict[str, Any]:
    """Return the call arguments over `model.call` in rollouts and updates: none, or those that switch guidance off.

    Args:
        guidance: `model.guidance`, that of the `pipeline` or `none`.
    """
    if guidance == "pipeline":
        return {}
    embedded = any(module.config.get("guidance_embeds") for module in policy.modules.values())
    return unguided(type(policy.pipe), embedded)


def check_unguided(policy: DiffusersPolicy, rows: Sequence[Row]) -> None:
    """Refuse a pipeline that evaluates several branches under the `training_call` of guidance `none`.

    Raises:
        InputError: a step evaluates more than one branch.
    """
    state, before = policy.start(rows[:1]), policy.evaluations
    with torch.no_grad(), policy.walk.uncounted():
        policy.velocity(state, policy.sigmas[0], rows[:1])
        branches = policy.evaluations - before
    if branches > 1:
        raise InputError(
            f"model.guidance: {type(policy.pipe).__name__} has no call argument that switches its guidance off (a step "
            f"still evaluates {branches} branches), set model.guidance=pipeline"
        )


def guidance_branches(pipeline: type, call: dict[str, Any]) -> int:
    """Return how many samples the model evaluates for one guided sample: 2 under classifier-free guidance, otherwise 1.

    Read off the class: its own property where it has one, and `true_cfg_scale` where the call takes it.
    """
    parameters = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    value = {name: call.get(name, p.default) for name, p in parameters.items()}
    if "true_cfg_scale" in value:
        negative = value.get("negative_prompt") is not None or value.get("negative_prompt_embeds") is not None
        return 2 if (value["true_cfg_scale"] or 1) > 1 and negative else 1
    declared = getattr(pipeline, "do_classifier_free_guidance", None)
    if isinstance(declared, property) and isinstance(value.get("guidance_scale"), int | float):
        try:
            return 2 if declared.fget(SimpleNamespace(_guidance_scale=value["guidance_scale"])) else 1
        except AttributeError:  # it reads more of the pipeline than its scale
            return 2 if value["guidance_scale"] > 1 else 1
    return 1
