"""Sampling from a flow model, with or without an adapter (`flowgrpo sample`), or with the weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from flowgrpo.data import conditions
from flowgrpo.data.prompts import Row
from flowgrpo.flow import setup
from flowgrpo.flow.config import Config, Model
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.pipeline.adapter_steps import enable
from flowgrpo.flow.pipeline.call_arguments import check_call
from flowgrpo.flow.pipeline.inputs.modality import frame_rate, sampling_rate
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.rollouts.prompt_encoding import eval_call
from flowgrpo.schema.validation import checked
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.lora import lora_files
from flowgrpo.training.reports.samples import SAMPLING_RATE, ModelUse, Sample, Sampler, Switches, unscored
from rewards.compute import default_device


def sampler(use: ModelUse, rows: Sequence[Row]) -> Sampler:
    """Load a model and return its ODE sampler.

    Raise InputError if there is no such model, adapter or argument, the model or the machine does not support a switch,
    or the model does not take the rows' conditions.
    """
    policy = load_policy(use, rows)

    def generate(part: Sequence[Row]) -> list[Sample]:
        with limited(policy, use):
            return unscored(part, list(policy.generate(part)))

    return build_sampler(policy, rows, generate)


def run_sampler(settings: Config, run: Path, found: Path, rows: Sequence[Row]) -> Sampler:
    """Load a run's model with the weights of its checkpoint `found`, and return the sampler that its evaluations have.

    The weights are the average, if it is saved there. Raise InputError if the model or the weights cannot be loaded, or
    the model does not take the rows' conditions.
    """
    setup.check_model(settings.model)

    def encode(policy: DiffusersPolicy) -> None:
        conditions.check((row.columns for row in rows), policy.takes, "--set")
        with policy.call_overrides(**eval_call(settings, policy)):
            policy.prepare(rows, "eval.call" if settings.eval.call else "model.call")

    kept = lora_files.with_kept_lora(settings, run)
    policy, weights = setup.policy_and_weights(kept, torch.device(default_device()), encode, learns=False)
    checkpoint.load_averaged(found, weights)
    call = eval_call(settings, policy)

    def generate(part: Sequence[Row]) -> list[Sample]:
        limited = policy.limited(settings.eval.adapter_steps, weights.enable_training)
        with policy.call_overrides(**call), limited:
            return unscored(part, list(policy.generate(part)))

    with policy.call_overrides(**call):
        return build_sampler(policy, rows, generate)


def use_of(settings: Config) -> ModelUse:
    """Return the use of a config's model before any training, called as its evaluations call it."""
    model, switches = settings.model, vars(Switches())
    adapter = model.merge if model.lora is None else model.lora.path
    return ModelUse(
        path=model.path,
        call={**model.call, **settings.eval.call},
        adapter=adapter,
        dtype=model.dtype,
        quantise=model.quantise,
        variant=model.variant,
        adapter_steps=settings.eval.adapter_steps if adapter is not None else None,
        switches=Switches(**{name: getattr(model, name) for name in switches}),
    )


def build_sampler(
    policy: DiffusersPolicy, rows: Sequence[Row], generate: Callable[[Sequence[Row]], list[Sample]], word: str = "ode"
) -> Sampler:
    """Return the sampler of a policy, with the rates of its sounds and videos."""
    sounds = sampling_rate(policy.pipe) or SAMPLING_RATE
    return Sampler(rows, generate, word, sampling_rate=sounds, frame_rate=frame_rate(policy.pipe, policy.call))


def limited(policy: DiffusersPolicy, use: ModelUse) -> AbstractContextManager[None]:
    """Return a context in which whole runs use the adapter in `use.adapter_steps` only."""
    return policy.limited(use.adapter_steps, lambda on: enable(policy.modules.values(), on), "--adapter-steps")


def model_section(use: ModelUse) -> Model:
    """Return the config section of a model that is used; raise InputError if an option is wrong."""
    of_model = {"path": use.path, "variant": use.variant, "dtype": use.dtype, "quantise": use.quantise}
    return checked(Model, {**of_model, "lora": {"path": use.adapter}, **vars(use.switches)}, "model")


def load_policy(use: ModelUse, rows: Sequence[Row]) -> DiffusersPolicy:
    """Load a model and its adapter, and encode the rows' prompts; errors are those of `sampler`."""
    model = model_section(use)
    setup.check_model(model)
    check_call(load.pipeline_class(use.path), use.call or {})
    with lora_files.named("--adapter"):
        begun = initial_lora.adapters(model)
    if use.adapter_steps is not None:
        initial_lora.refuse_shifts(begun, "--adapter-steps")
    setup.check_installed(model, default_device(), learns=False)

    def encode(policy: DiffusersPolicy) -> None:
        conditions.check((row.columns for row in rows), policy.takes, "--prompts")
        policy.prepare(rows, "call")

    policy = load.load_policy(
        use.path,
        use.dtype,
        use.call,
        quantise=use.quantise,
        variant=use.variant,
        encode=encode,
        text_encoders=use.switches.text_encoders,
    )
    setup.set_switches(model, policy, policy.pipe.device)
    if begun:
        setup.trainable(model, policy, ema=None, begun=begun)
    return policy
