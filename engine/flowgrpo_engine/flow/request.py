"""Requests to an engine of flow models: refuse runs that it cannot sample for, and build requests for the others.

An engine samples chains. Each sample has one generator for its start and all its noise, seeded by the request's seed and the
sample's index in the request. So noise has no addresses, and samples share no start and no state. The engine's kernels are
`flow_sde` and `cps` at one level, with ODE steps elsewhere (scheduler_rl_mixin.py of sgl-project/sglang at 1e7c5863). Its
log-probabilities are means over the dimensions, without constants on request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from flowgrpo.data import embedded
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.call_arguments import RESERVED
from flowgrpo.flow.pipeline.guidance import guidance_branches
from flowgrpo.flow.pipeline.inputs.modality import modality_of
from flowgrpo.schema.engine import Engine
from flowgrpo_engine import service
from flowgrpo_engine.service import INSTEAD, KEY
from rewards.base import nearest
from samplers.batches import batched
from samplers.kernels import Kernel
from samplers.trees import TRUNK, Plan, Root

KINDS = {"flow_sde": "sde", "cps": "cps"}  # our kernel -> the engine's name
SIZES = ("height", "width", "num_inference_steps")
CALL = (*SIZES, "num_frames", "guidance_scale", "true_cfg_scale", "negative_prompt")
NEAR_ONE = (0.999, 1 - 1e-5)  # our kernel treats sigmas in between as 1, the engine's does not


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of a rollout.

    Attributes:
        kernel: kernel of the stochastic steps.
        stochastic: indices of the stochastic steps.
        trained: indices of the trained steps.
    """

    kernel: Kernel
    stochastic: list[int]
    trained: list[int]

    @property
    def returned(self) -> list[int]:
        """Indices of the states that the engine returns: before and after each trained step."""
        return sorted({step + after for step in self.trained for after in (0, 1)})


def check(config: Config, pipeline: type, prompts: Sequence[Prompt] = ()) -> None:
    """Refuse a run that an engine cannot roll out for, by its configuration and the class of its pipeline.

    Args:
        prompts: the training prompts.

    Raises:
        InputError: the sentence says what to set instead.
    """
    run, algorithm, kernel = config.run, config.algorithm, config.algorithm.kernel
    if run.context_parallel > 1:
        raise InputError(f"run.context_parallel: an engine splits calls itself; set it to 1, {INSTEAD}")
    service.check(config)
    assert run.engine is not None
    if run.engine.log_probs:
        raise InputError(f"{KEY}.log_probs: an engine of a flow model always returns them; remove it")
    if config.train.draft is not None:
        raise InputError(
            f"train.draft: an engine draws its own starts, so no draft can choose them; set it to null, {INSTEAD}"
        )
    if algorithm.tree.start == "shared":
        raise InputError(
            f"algorithm.tree.start: an engine draws a new start for each sample; take independent, {INSTEAD}"
        )
    if kernel.name not in KINDS:
        raise InputError(
            f"algorithm.kernel: an engine cannot sample with {kernel.name}; take {' or '.join(KINDS)}, {INSTEAD}"
        )
    if kernel.calibrate is not None:
        raise InputError(
            f"algorithm.kernel.calibrate: an engine has one noise level for all steps; set it to null, {INSTEAD}"
        )
    call = config.model.call
    for name in run.engine.untold:
        if name not in call:
            raise InputError(f"{KEY}.untold: {name!r} is not in model.call, {nearest(name, call)}")
    for name in call:
        if name not in (*CALL, *run.engine.untold):
            raise InputError(
                f"model.call.{name}: an engine takes no such argument in a request; start the engine with the same value "
                f"and add it to {KEY}.untold, {INSTEAD}"
            )
    taken = {*inspect.signature(inspect.unwrap(pipeline.__call__)).parameters} - {*RESERVED, "negative_prompt"}
    for name in dict.fromkeys(
        name for prompt in prompts for name, value in prompt.columns.items() if value is not None
    ):
        if name in taken:
            raise InputError(f"prompts.train: an engine does not use the column {name}; remove it, {INSTEAD}")
    count = _sizes(pipeline, {**embedded.default_call(config.model.path), **call})["num_inference_steps"]
    steps_of(algorithm.tree.plan(kernel.kernels(count), config.train.group_size, run.seed, 0), count)


def steps_of(plan: Plan, count: int) -> Steps:
    """Return the steps of a plan over `count` steps; the plan must be one chain with one stochastic kernel.

    Raises:
        InputError: the plan branches, measures states on the way, or has several noise levels.
    """
    kernels, trained = {}, []
    for step in range(count):
        moves = plan(TRUNK, step)
        if len(moves) != 1 or moves[0].count != 1 or moves[0].ode_stops is not None or moves[0].role != TRUNK:
            raise InputError(
                f"algorithm.tree: an engine samples chains without branches; take chain or window, or set {KEY}=null"
            )
        if moves[0].kernel.stochastic:
            kernels[step] = moves[0].kernel
        if moves[0].trained:
            trained.append(step)
    if len(set(kernels.values())) != 1:
        raise InputError(
            f"algorithm.kernel.level: an engine has one noise level for all steps; give one level, or set {KEY}=null"
        )
    return Steps(kernel=next(iter(kernels.values())), stochastic=sorted(kernels), trained=trained)


def check_sigmas(steps: Steps, sigmas: Sequence[float]) -> None:
    """Refuse stochastic steps that an engine takes and scores differently.

    Raises:
        InputError: a step begins so near to sigma 1 that our kernel treats it as 1 and the engine's does not.
    """
    for step in steps.stochastic:
        if NEAR_ONE[0] < sigmas[step] < NEAR_ONE[1]:
            raise InputError(
                f"algorithm.tree.steps: step {step} begins at sigma {sigmas[step]:.6g}, which counts as 1 here but "
                f"not in an engine; begin one step later, or set {KEY}=null"
            )


def call_of(pipeline: type, call: Mapping[str, Any], *, distilled: bool, untold: Sequence[str]) -> dict[str, Any]:
    """Return the sampling parameters of a request from the arguments of a pipeline's call.

    An engine applies guidance if its scale is above 1 and it has a negative prompt. The scale is `true_cfg_scale`, or
    `guidance_scale` for a model without it. The scale of a guidance-distilled model is set when the engine starts
    (embedded_cfg_scale).

    Args:
        distilled: whether `guidance_scale` is an input of the network.
        untold: arguments that are left out.

    Raises:
        InputError: a size is not given, or the pipeline applies guidance in another way.
    """
    parameters = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    value = {name: call.get(name, p.default) for name, p in parameters.items() if name in CALL}
    told: dict[str, Any] = dict(_sizes(pipeline, call))
    negative, scale = value.get("negative_prompt"), value.get("guidance_scale")
    if "true_cfg_scale" in value:
        scale = value["true_cfg_scale"] if negative is not None else 1.0
        told["true_cfg_scale"] = float(scale)
    elif distilled or scale is None:
        scale = 1.0
    guided = scale > 1
    if guided != (guidance_branches(pipeline, dict(call)) > 1):
        raise InputError(
            f"{KEY}: {pipeline.__name__} applies guidance in another way than an engine; set model.guidance=none, "
            f"or {KEY}=null"
        )
    told["guidance_scale"] = float(scale)
    if guided:
        told["negative_prompt"] = negative or ""
    return {name: value for name, value in told.items() if name not in untold}


def _sizes(pipeline: type, call: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a request from a pipeline's call.

    Raises:
        InputError: a size is neither given nor a default of the class.
    """
    parameters = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    told = {}
    for name in (*SIZES, *(["num_frames"] if modality_of(pipeline) == "video" else [])):
        size = call.get(name, parameters[name].default if name in parameters else None)
        if not isinstance(size, int):
            raise InputError(f"model.call.{name}: an engine needs it; give a number")
        told[name] = size
    return told


def requests_of(
    roots: Sequence[Root], steps: Steps, call: Callable[[Row], Mapping[str, Any]], section: Engine
) -> list[tuple[list[int], dict[str, Any]]]:
    """Return the requests for the samples of `roots`, each with the indices of its roots.

    Args:
        roots: their rows have the seeds of the samples.
        call: returns the sampling parameters of a row; see `call_of`.
    """
    shared = {
        "rollout": True,
        "rollout_sde_type": KINDS[steps.kernel.name],
        "rollout_noise_level": steps.kernel.level,
        "rollout_log_prob_no_const": steps.kernel.log_prob == "constant_free",
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": False,
        "rollout_return_dit_trajectory": True,
        "rollout_sde_step_indices": steps.stochastic,
        "rollout_return_step_indices": steps.returned,
        "suppress_logs": True,
        **({"extra_sampling_params": section.options} if section.options else {}),
    }
    order = sorted(range(len(roots)), key=lambda i: (roots[i].group, roots[i].index))
    requests = []
    # Roots with consecutive indices in a group share the difference between that index and their place in this order.
    for _, run in groupby(enumerate(order), lambda at: (roots[at[1]].group, roots[at[1]].index - at[0])):
        neighbours = [i for _, i in run]
        for part in batched(neighbours, section.samples or len(neighbours)):
            row = roots[part[0]].row
            row_call = {"prompt": row.prompt, "seed": row.seed, "num_outputs_per_prompt": len(part), **call(row)}
            requests.append((part, row_call | shared))
    return requests
