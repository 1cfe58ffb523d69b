"""Guidance branches, and the call arguments that switch them off."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.errors import InputError

if TYPE_CHECKING:
    from flowgrpo.data.prompts import Row
    from flowgrpo.flow.pipeline.policy import DiffusersPolicy, Policy


def training_call(guidance: str, policy: Policy) -> dict[str, Any]:
    """Return the call arguments for rollouts, on top of `model.call`; `guidance` is `model.guidance`."""
    return policy.unguided() if guidance == "none" else {}


def update_call(guidance: str, policy: Policy) -> dict[str, Any]:
    """Return the call arguments for updates, on top of `model.call`; `guidance` is `model.guidance`."""
    return {} if guidance == "pipeline" else policy.unguided()


@contextmanager
def updating(guidance: str, policy: Policy, rows: Sequence[Row]) -> Iterator[None]:
    """Return a context in which the policy has the call arguments of an update, on top of those of `training_call`.

    The first of `rows` is encoded to find the schedule.
    """
    if guidance != "rollout":
        yield
        return
    with policy.call_overrides(**update_call(guidance, policy)):
        policy.start(rows[:1])
        yield


def mixes_levels(guidance: str, policy: Policy, rows: Sequence[Row]) -> bool:
    """Return whether rows at unequal noise levels may share a call of an update; `guidance` is `model.guidance`.

    See `Policy.mixes_levels`.
    """
    with policy.call_overrides(**update_call(guidance, policy)):
        return policy.mixes_levels(rows)


def check_unguided(policy: DiffusersPolicy, rows: Sequence[Row]) -> None:
    """Raise InputError for a pipeline that evaluates several branches although its guidance is off."""
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
    """Return the network evaluations per sample and step: 2 with classifier-free guidance, otherwise 1."""
    parameters = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    value = {name: call.get(name, p.default) for name, p in parameters.items()}
    if "true_cfg_scale" in value:
        negative = value.get("negative_prompt") is not None or value.get("negative_prompt_embeds") is not None
        return 2 if (value["true_cfg_scale"] or 1) > 1 and negative else 1
    declared = getattr(pipeline, "do_classifier_free_guidance", None)
    if isinstance(declared, property) and isinstance(value.get("guidance_scale"), int | float):
        try:
            return 2 if declared.__get__(SimpleNamespace(_guidance_scale=value["guidance_scale"])) else 1
        except AttributeError:  # the property reads more of the pipeline than the scale
            return 2 if value["guidance_scale"] > 1 else 1
    return 1
