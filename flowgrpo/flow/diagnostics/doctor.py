"""Checks of `flowgrpo doctor`: the certificate on the user's model, and common problems of a run.

The checks of single model calls, of gradients, of time and of the export use a schedule of two steps, with samples of the
run's size. The others (`runs`, spread and spectrum) use the whole schedule.
"""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from flowgrpo.data import conditions, prompts, stored
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.config import Config
from flowgrpo.flow.diagnostics import spectrum, tree_advice
from flowgrpo.flow.diagnostics.certificate import replay, roll_out
from flowgrpo.flow.methods.kernel_options import FlowSDE
from flowgrpo.flow.model import initial_lora, memory_estimate
from flowgrpo.flow.outputs.export import encoders_to_save, write_weights
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.inputs import modality
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.loading.load import pipeline_class
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.planning import memory_budget
from flowgrpo.flow.planning.plan import plan
from flowgrpo.training.reports.doctor_checks import (
    Check,
    gap_of,
    memory_left,
    reloaded,
    seconds_of,
    spread,
    warnings_heard,
)
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring import scorer
from flowgrpo.training.scoring.scorer import score
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward
from rewards.audio import join_samples
from rewards.compute import default_device
from samplers import noise
from samplers.batches import batched
from samplers.kernels import Kernel

SPREAD_SIZE = 4
HALF_PRECISION_DRIFT = 1e-4
REMEDY = (
    "lower train.micro_batch and train.rollout_batch, or set model.gradient_checkpointing, model.vae=offload or "
    "model.text_encoders=free"
)
DEFAULT_REWARDS = {"image": "jpeg_size", "video": "motion", "audio": "loudness"}
DEFAULT_PROMPTS = ("a photograph of a red fox in the snow", "a cat")


def defaults(model: str) -> dict[str, Any]:
    """Return a default config for a model (built-in name, folder or hub id); raise InputError if there is no such model."""
    if model in EMBEDDED:
        return {"model": {"path": model}, "rewards": [{"use": EMBEDDED[model].reward}]}
    reward = DEFAULT_REWARDS[modality.modality_of(pipeline_class(model))]
    return {"model": {"path": model}, "rewards": [{"use": reward}]}


def examine(settings: Config, evaluations: int | None = None) -> Iterator[Check]:
    """Run all checks of a config, and yield each as it completes; raise InputError or RewardError if the config is wrong.

    The check `spectrum` takes `evaluations` model evaluations; None: those of about a minute, 600 or more. The check
    `tree` takes up to half as many again.
    """
    cost = plan(settings)
    rewards, _ = scorer.rewards(settings.rewards)
    chosen = _prompts(settings, rewards)
    measured = _prompts_of_spectrum(settings, chosen)
    setup.check_rewards(rewards, [*chosen, *measured], settings.model)
    device = default_device()
    begun = initial_lora.adapters(settings.model)
    memory_estimate.check(settings, device, begun)
    kept = settings.model.model_copy(update={"text_encoders": encoders_to_save(settings.model)})
    settings = settings.model_copy(update={"model": kept})
    refused: list[Check] = []

    def encode(policy: DiffusersPolicy) -> None:
        conditions.check((prompt.columns for prompt in (*chosen, *measured)), policy.takes, "prompts.train")
        rows = [Row(p.text, 0, p.columns) for p in dict.fromkeys((*chosen, *measured))]
        with policy.call_overrides(**guidance.training_call(settings.model.guidance, policy)):
            try:
                policy.prepare(rows)
                with policy.call_overrides(num_inference_steps=2):
                    policy.prepare(rows)
            except InputError as error:
                refused.append(_cause(policy, rows[0], str(error)))
                raise

    try:
        with phase("loading"):
            policy, weights = setup.policy_and_weights(settings, device, encode, begun)
    except InputError:
        if not refused:
            raise
        yield from refused
        return
    chosen, measured = (setup.with_sampling_rate(each, policy) for each in (chosen, measured))
    with policy.call_overrides(**guidance.training_call(settings.model.guidance, policy)):
        yield from _checks(
            settings,
            cost,
            policy=policy,
            weights=weights,
            rewards=rewards,
            chosen=chosen,
            measured=measured,
            evaluations=evaluations,
        )


def _checks(
    settings: Config,
    cost: dict[str, Any],
    *,
    policy: DiffusersPolicy,
    weights: Weights,
    rewards: Sequence[Reward],
    chosen: Sequence[prompts.Prompt],
    measured: Sequence[prompts.Prompt],
    evaluations: int | None,
) -> Iterator[Check]:
    rows = [Row(p.text, i, p.columns) for i, p in enumerate((chosen[0], chosen[0], chosen[-1]))]

    try:
        policy.check(rows)
        if settings.model.guidance != "pipeline":
            with policy.call_overrides(**guidance.update_call(settings.model.guidance, policy)):
                guidance.check_unguided(policy, rows)
    except InputError as error:
        yield _cause(policy, rows[0], str(error))
        return
    sharing = (
        "samples share model calls" if policy.capabilities.max_batch is None else "one sample a call, which is slower"
    )
    for sentence in cost["warnings"]:
        yield Check("warning", True, sentence)
    yield Check("runs", True, f"{type(policy.pipe).__name__}, {len(policy.sigmas) - 1} steps, {sharing}")
    with policy.call_overrides(num_inference_steps=2):
        policy.prepare(rows)
        policy.start(rows[:1])
        yield _conditioning(policy, rows[0])
        yield _times(policy, rows[0])
        yield from _drift_and_gradients(policy, weights, rows, settings)
    policy.prepare(rows)
    policy.offload()
    branches = cost["geometry"]["guidance_branches"]
    begun, before = time.perf_counter(), policy.evaluations
    spread = _spread(policy, rewards, chosen, settings.train.rollout_rows)
    steps_a_second = (policy.evaluations - before) / branches / (time.perf_counter() - begun)
    yield spread
    if evaluations is None:
        evaluations = max(spectrum.EVALUATIONS, round(spectrum.SECONDS * steps_a_second))
    measured_rows = [Row(p.text, 0, p.columns) for p in measured]
    found = spectrum.measure(
        policy,
        rewards,
        measured_rows,
        baseline=settings.algorithm.baseline,
        kernels=_noisy_kernels(policy, settings),
        size=settings.train.rollout_rows,
        evaluations=evaluations,
    )
    yield found.check
    per_row = _seconds_per_row(policy, weights, rows, settings=settings, branches=branches)
    yield _time(per_row, cost)
    steps = len(policy.sigmas) - 1
    rolls_out = settings.data.groups is None and settings.run.engine is None and not policy.pins
    if found.shares and rolls_out and steps >= tree_advice.STEPS:
        number, starts = spectrum.starts_of(2 * steps, len(measured_rows), evaluations // 2)

        def decided_at(split: int) -> float:
            return spectrum.decided_at(
                policy,
                rewards,
                spectrum.roots_of(measured_rows[:number], starts),
                baseline=settings.algorithm.baseline,
                kernels=FlowSDE(level=tree_advice.LEVEL).kernels(steps),
                split=split,
                size=settings.train.rollout_rows,
            )

        yield tree_advice.check(
            found.shares,
            steps,
            tree_advice.Seconds(
                step=per_row["rollout"],  # both presets sample without guidance
                draw=per_row["update"],
                score=per_row["decode"] + found.reward_seconds,
            ),
            decided_at,
        )
    yield memory_left(default_device(), REMEDY, lambda room: memory_budget.fit(settings, room))
    yield _reload(policy, weights, rows[0], settings)


def _noisy_kernels(policy: DiffusersPolicy, settings: Config) -> Sequence[Kernel]:
    """Return the kernel of each step; flow_sde where all steps are ODE, or all but those at which trees split."""
    algorithm = settings.algorithm
    splits = algorithm.likelihood.name == "elbo" and algorithm.tree.name in ("branch_window", "brush")
    noisy = FlowSDE() if splits or algorithm.kernel.name == "ode" else algorithm.kernel
    return noisy.kernels(len(policy.sigmas) - 1)


def _prompts(settings: Config, rewards: Sequence[Reward]) -> list[prompts.Prompt]:
    """Return the longest prompt, a prompt for each reward that applies to neither longest nor shortest, and the shortest."""
    stored_prompts = settings.data.groups is not None
    if not stored_prompts and settings.prompts.train in prompts.SMALL and settings.model.path not in EMBEDDED:
        return [prompts.Prompt(text) for text in DEFAULT_PROMPTS]
    longest_first = sorted(stored.train_prompts(settings), key=lambda p: -len(p.text))
    ends = longest_first[0], longest_first[-1]
    left = [reward for reward in rewards if not any(reward.applies(p.columns) for p in ends)]
    return [
        longest_first[0],
        *(prompt for _, prompt in scorer.pair_with_prompts(left, longest_first)),
        longest_first[-1],
    ]


def _prompts_of_spectrum(settings: Config, chosen: Sequence[prompts.Prompt]) -> list[prompts.Prompt]:
    """Return random prompts, or those chosen where the config has none of its own."""
    if chosen[0].text in DEFAULT_PROMPTS:
        return list(dict.fromkeys(chosen))
    every = stored.train_prompts(settings)
    order = noise.generator(settings.run.seed, "spectrum").permutation(len(every))
    return [every[i] for i in order[: spectrum.PROMPTS]]


def _cause(policy: DiffusersPolicy, row: Row, refusal: str) -> Check:
    """Return the failed check of a pipeline that cannot run step by step: nondeterminism if found, else `refusal`."""
    with suppress(Exception):  # the pipeline may not run at all
        deterministic = _conditioning(policy, row)
        if not deterministic.ok:
            return deterministic
    given = any(name in row.columns for name in conditions.COLUMNS)
    lacking = [n for n in conditions.COLUMNS if n in policy.takes and n not in policy.call and n not in row.columns]
    hint = f" (if it needs a condition, give a config whose rows have the column {' or '.join(lacking)})"
    return Check("runs", False, "no", refusal + hint * bool(lacking and not given))


@torch.no_grad()
def _conditioning(policy: DiffusersPolicy, row: Row) -> Check:
    """Check that two equal calls give equal velocities."""
    state = policy.start([row])
    first, second = (policy.velocity(state, policy.sigmas[0], [row]) for _ in range(2))
    gap = max(gap_of(a, b) for a, b in zip(first, second, strict=True))
    advice = (
        "the pipeline gives another velocity for the same input: part of it, such as its conditioning, is random and "
        "ignores the generator and torch's seed, or is in training mode (dropout); make it repeatable"
    )
    return Check("conditioning", gap == 0, f"{gap:.1e} between two equal calls", advice if gap else "")


@torch.no_grad()
def _times(policy: DiffusersPolicy, row: Row) -> Check:
    """Check that timesteps reach the network in a dtype at least as precise as its weights."""
    seen: list[torch.Tensor] = []

    def look(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        seen.extend(v for k, v in given.items() if k.startswith("timestep") and isinstance(v, torch.Tensor))

    handles = [m.register_forward_pre_hook(look, with_kwargs=True) for m in policy.modules.values()]
    policy.velocity(policy.start([row]), policy.sigmas[1], [row])
    for handle in handles:
        handle.remove()
    network: Any = next(iter(policy.modules.values()))
    stored = torch.float32 if policy.autocast else network.dtype
    kinds = [t.dtype for t in (*seen, policy.scheduler.timesteps, policy.scheduler.sigmas) if t.is_floating_point()]
    worst = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    names = ", ".join(sorted({str(kind).removeprefix("torch.") for kind in kinds}))
    advice = (
        f"the pipeline rounds times or sigmas to {names}, so a step is computed for another time than the schedule's; "
        "keep them in float32"
    )
    ok = worst <= torch.finfo(stored).eps
    return Check("times", ok, f"{names}, weights in {str(stored).removeprefix('torch.')}", "" if ok else advice)


def _drift_and_gradients(
    policy: DiffusersPolicy, weights: Weights, rows: Sequence[Row], settings: Config
) -> list[Check]:
    """Check that a replay reproduces log-probabilities, and that its gradients are finite and nonzero."""
    tree = roll_out(policy, rows, _noisy_kernels(policy, settings), len(rows))
    largest = replay(policy, tree)
    bound = 0.0 if settings.model.dtype == "float32" else HALF_PRECISION_DRIFT
    norms = [float(p.grad.norm()) for p in weights.parameters if p.grad is not None]
    for p in weights.parameters:
        p.grad = None
    finite = all(torch.isfinite(torch.tensor(norms))) if norms else False
    total = sum(norm**2 for norm in norms) ** 0.5
    exact, learns = largest <= bound, finite and total > 0
    wrong_ratio = (
        "the update does not reproduce the log-probabilities of the rollout, so every ratio is wrong: the checks above "
        "may say why; if not, try another attention backend, or model.dtype=float32"
    )
    unlearnt = (
        "gradients are not finite: try model.dtype=bfloat16 instead of float16, or float32"
        if norms and not finite
        else "no gradient reaches the trained weights: does part of the forward pass run under no_grad?"
    )
    reached = f"norm {total:.1e} over {len(norms)} of {len(weights.parameters)} tensors"
    return [
        Check("drift", exact, f"{largest:.1e}, the limit is {bound:g}", "" if exact else wrong_ratio),
        Check("gradients", learns, reached, "" if learns else unlearnt),
    ]


def _spread(policy: DiffusersPolicy, rewards: Sequence[Reward], chosen: Sequence, size: int) -> Check:
    """Check that every reward varies within a group of real samples."""
    groups = [[Row(p.text, 1000 * g + i, p.columns) for i in range(SPREAD_SIZE)] for g, p in enumerate(chosen)]
    values = []
    with phase("sampling", len(groups) * SPREAD_SIZE) as sampling, warnings_heard() as warned:
        for rows in groups:
            samples = join_samples([policy.generate(batch) for batch in batched(rows, size)])
            values.append(score(rewards, samples, rows).values)
            sampling.advance(len(rows))
    return spread(rewards, values, warned)


def _seconds_per_row(
    policy: DiffusersPolicy, weights: Weights, rows: Sequence[Row], *, settings: Config, branches: int
) -> dict[str, float]:
    """Measure the seconds of one evaluation of a row in a `rollout` and in an `update`, and of its `decode`."""
    size, trained = (min(most, 8) for most in (settings.train.rollout_rows, settings.train.update_rows))
    batch = [replace(rows[0], seed=i) for i in range(max(size, trained))]
    rollout_batch, update_batch = batch[:size], batch[:trained]
    with policy.call_overrides(num_inference_steps=2):
        state, sigma = policy.start(batch), policy.sigmas[0]
        rolled, replayed = (tuple(x[: len(part)] for x in state) for part in (rollout_batch, update_batch))
        with torch.no_grad():
            forward = seconds_of(lambda: policy.velocity(rolled, sigma, rollout_batch))
            decoding = seconds_of(lambda: policy.decode(rolled, rollout_batch))

        def learn() -> None:
            losses = (v.float().square().mean() for v in policy.velocity(replayed, sigma, update_batch))
            cast("torch.Tensor", sum(losses)).backward()

        update = seconds_of(learn)
    for p in weights.parameters:
        p.grad = None
    return {"rollout": forward / size / branches, "update": update / trained / branches, "decode": decoding / size}


def _time(per_row: dict[str, float], cost: dict[str, Any]) -> Check:
    """Estimate the seconds of an iteration."""
    with_gradient = cost["with_gradient"]
    total = (
        (sum(cost["model_evaluations"].values()) - with_gradient) * per_row["rollout"]
        + with_gradient * per_row["update"]
        + cost["decoded"] * per_row["decode"]
    )
    samples = cost["decoded"] or cost["geometry"]["samples"]  # stored samples are not decoded
    return Check("time", True, f"about {total:.1f} s for an iteration of {samples} samples, without the rewards")


def _reload(policy: DiffusersPolicy, weights: Weights, row: Row, settings: Config) -> Check:
    """Check that changed weights give the same sample after an export and a load into a fresh pipeline."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), policy.call_overrides(num_inference_steps=2):
        before = policy.generate([row])
        for p in weights.parameters:
            p.add_(0.02 * torch.randn(p.shape, generator=generator).to(p))
        changed = policy.generate([row])
    with tempfile.TemporaryDirectory() as folder:
        write_weights(policy, weights, Path(folder))
        call, device, dtype = policy.call, policy.pipe.device, settings.model.dtype
        source = folder if weights.lora is None else settings.model.path
        policy.embeddings.restore()
        policy.pipe.to("cpu")  # the device may not hold two models
        adapter = None if source == folder else Path(folder)
        variant = settings.model.variant if adapter else None
        fresh = load.load_policy(
            source, dtype, call, device, adapter=adapter, quantise=settings.model.quantise, variant=variant
        )
        with fresh.call_overrides(num_inference_steps=2):
            gap = gap_of(fresh.generate([row]), changed)
    moved = gap_of(before, changed)
    advice = "the exported weights do not reproduce the trained pipeline; please report this class"
    return reloaded(gap, moved, "sample", advice)
