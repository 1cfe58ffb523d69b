"""Sampling from a language model, with or without an adapter (`flowgrpo sample`), or with the weights of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowgrpo.data.generators import templates
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import TextConfig, TextModel
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.methods.decoder_options import Decoding
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy, apply_actions
from flowgrpo.mdlm.models import initial_lora
from flowgrpo.mdlm.outputs.export import SCHEDULE_FILE, with_schedule
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.setup import load_text_policy, policy_and_weights
from flowgrpo.schema.lora import Lora
from flowgrpo.schema.validation import checked
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.lora import lora_files
from flowgrpo.training.reports.samples import ModelUse, Sample, Sampler, Switches, unscored
from flowgrpo.training.weights.trained_weights import Weights
from rewards.base import nearest
from rewards.compute import default_device

OPTIONS = ("length", "chat", "trust_remote_code", "mask_id", "shift", "attention", "block_size", "decoder", "template")


def sampler(use: ModelUse, rows: Sequence[Row]) -> Sampler:
    """Load a language model and return its sampler; raise InputError if there is no such model, adapter or option.

    `use.call` may have keys of the config's section `model`; `decoder`, a name or a map like `eval.decoder`; and
    `template`, a name of `flowgrpo.data.generators.templates`, which is put around the prompts of `rows`. The decoder
    `scheduled` reads a learned schedule from the adapter's folder, or without an adapter from the model's.
    """
    if asked := [name for name, value in vars(use.switches).items() if value != getattr(Switches(), name)]:
        hint = ", write attention=block without the dashes" if asked[0] == "attention" else ""
        raise InputError(f"--{asked[0].replace('_', '-')}: pipelines have that, {use.path} is a language model{hint}")
    if use.adapter_steps is not None:
        raise InputError(f"--adapter-steps: it is a part of a schedule of noise, {use.path} is a language model")
    adapter, template = use.adapter, use.call.get("template")
    if template is not None and template not in templates.TEMPLATES:
        raise InputError(f"template: {template!r} is unknown, {nearest(str(template), templates.TEMPLATES)}")
    rows = [replace(row, prompt=templates.apply(template, row.prompt)) for row in rows]
    chosen, decoding = options(use.path, use.dtype, use.call, variant=use.variant)
    chosen = chosen.model_copy(update={"quantise": use.quantise, "lora": checked(Lora, {"path": adapter}, "--adapter")})
    with lora_files.named("--adapter"):
        file = initial_lora.read(chosen)
        policy = load_text_policy(chosen, default_device())
        network = policy.predictor.model
        if begun := initial_lora.adapters(chosen, file, network):
            Weights({initial_lora.NETWORK: network}, begun)
    decoder = decoding.build(policy.length, policy.eos_id, "decoder", predictor=policy.predictor)
    folder = Path(adapter if isinstance(adapter, str) else use.path)
    learned = decoding.name == "scheduled" and (folder / SCHEDULE_FILE).is_file()

    def generate(part: Sequence[Row]) -> list[Sample]:
        acting = with_schedule(decoder, folder, len(part)) if learned else decoder
        return _decode(policy, part, acting)

    return Sampler(rows, generate, "decoder")


def run_sampler(settings: TextConfig, run: Path, found: Path, rows: Sequence[Row]) -> Sampler:
    """Load a run's model with the weights of its checkpoint `found`, and return a sampler that decodes by `eval.decoder`.

    The weights are the average, if it is saved there; a learned schedule takes its medians. Raise InputError if the model
    or the weights cannot be loaded.
    """
    policy, weights = policy_and_weights(lora_files.with_kept_lora(settings, run), default_device(), learns=False)
    checkpoint.load_averaged(found, weights)
    decoder = settings.eval.decoder.build(policy.length, policy.eos_id, "eval.decoder", predictor=policy.predictor)
    module = weights.extra_modules.get("schedule")
    schedule = module if isinstance(module, SchedulePolicy) and settings.eval.decoder.name == "scheduled" else None

    def generate(part: Sequence[Row]) -> list[Sample]:
        acting = decoder if schedule is None else apply_actions(decoder, schedule.typical(len(part)))
        return _decode(policy, part, acting)

    return Sampler(rows, generate, "decoder")


def use_of(settings: TextConfig) -> ModelUse:
    """Return the use of a config's model before any training, decoded by `eval.decoder`."""
    model = settings.model
    given = {name: getattr(model, name) for name in OPTIONS if name in type(model).model_fields}
    return ModelUse(
        path=model.path,
        call={**given, "decoder": settings.eval.decoder.dump()},
        adapter=model.merge if model.lora is None else model.lora.path,
        dtype=model.dtype,
        quantise=model.quantise,
        variant=model.variant,
    )


def options(model: str, dtype: str, call: dict[str, Any], *, variant: str | None = None) -> tuple[TextModel, Decoding]:
    """Return the model section and the decoder of `key=value` arguments; raise InputError if one is wrong."""
    for key in call:
        if key not in OPTIONS:
            raise InputError(f"{key}: a language model has no such argument, {nearest(key, OPTIONS)}")
    given = {key: value for key, value in call.items() if key not in ("decoder", "template")}
    chosen = checked(TextModel, {"path": model, "dtype": dtype, "variant": variant, **given})
    decoding = checked(Decoding, call.get("decoder", {}), "decoder")
    decoding.build(chosen.length, 0, "decoder", block_size=chosen.block_size)  # raises before the weights load
    return chosen, decoding


def _decode(policy: TextPolicy, rows: Sequence[Row], decoder: Decoder) -> list[Sample]:
    seeds = [(row.seed,) for row in rows]
    completions = policy.generate([row.prompt for row in rows], decoder, seeds, len(rows))
    return unscored(rows, policy.as_samples(completions))
