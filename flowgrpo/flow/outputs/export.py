"""Export of a run's trained weights in formats that diffusers loads, with a model card and samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.loaders.lora_base import LoraBaseMixin

from flowgrpo.data import conditions, prompts
from flowgrpo.data.embedded import EMBEDDED, SAMPLER
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.config import Config, Model
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.outputs import comfyui_names
from flowgrpo.flow.pipeline.inputs.modality import frame_rate, modality_of, sampling_rate, task_of
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.networks import traits
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.schema.lora import LoraPath
from flowgrpo.schema.schedule import part_text
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.lora import lora_files
from flowgrpo.training.reports import markdown, model_card
from flowgrpo.training.reports.model_card import SAMPLES, Exported, Shown
from flowgrpo.training.reports.samples import SAMPLING_RATE, save_sample
from flowgrpo.training.weights.trained_weights import Weights
from rewards.compute import default_device
from rewards.files import suffixes

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig

SHIFTS = ("shift", "flow_shift", "use_dynamic_shifting", "base_shift", "max_shift", "shift_terminal")


def check(settings: Config, run: Path, found: Path, *, comfyui: bool) -> None:
    """Check that the checkpoint `found` can be exported, as far as this can be told without loading the model.

    Raise InputError if there is no such model, no evaluation prompts, or no copy of the LoRA that the run started from.
    With `comfyui`, raise it also if layers have no known names in ComfyUI; without, if that LoRA shifts parameters,
    which diffusers' LoRA files cannot hold.
    """
    kept = lora_files.with_kept_lora(settings, run)
    load.check_weights(settings.model.path, settings.model.variant)
    prompts.load_split(settings.prompts, "eval")
    begun = {} if settings.model.lora is None else initial_lora.adapters(kept.model)
    shifts = {name: adapter.shifts for name, adapter in begun.items() if adapter.shifts}
    if comfyui:
        comfyui_names.check(settings, found, shifts)
    elif shifts:
        name, paths = next(iter(shifts.items()))
        raise InputError(
            f"the LoRA that this run started from shifts {len(paths)} parameters, {name}.{min(paths)} first, which no LoRA "
            "file of diffusers can hold; export with --comfyui, which then writes the file for ComfyUI alone"
        )


def export(settings: Config, run: Path, found: Path, out: Path, *, comfyui: bool = False) -> Exported:
    """Write the weights of the checkpoint `found` (their average, if kept) to `out`, with a model card and samples.

    A LoRA becomes `pytorch_lora_weights.safetensors` for `pipe.load_lora_weights(out)`, unless it has shifts, which
    such files cannot hold. With `comfyui` it is also written under ComfyUI's names. Full weights become a pipeline for
    `from_pretrained(out)` with its stock scheduler. `check` must have passed.
    """
    portable = {"attention": None, "compile": False, "text_encoders": encoders_to_save(settings.model)}
    settings = settings.model_copy(update={"model": settings.model.model_copy(update=portable)})
    chosen = prompts.load_split(settings.prompts, "eval")[:SAMPLES]
    rows = [Row(p.text, i, p.columns) for i, p in enumerate(chosen)]

    def encode(policy: DiffusersPolicy) -> None:
        conditions.check((row.columns for row in rows), policy.takes, "prompts.eval")
        with policy.call_overrides(**settings.eval.call):
            policy.prepare(rows, "eval.call")

    policy, weights = setup.policy_and_weights(
        lora_files.with_kept_lora(settings, run), default_device(), encode, learns=False
    )
    step = checkpoint.load_averaged(found, weights)
    if weights.lora is None:  # full weights are written without a variant
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"variant": None})})
    out.mkdir(parents=True, exist_ok=True)
    also = comfyui_names.write(weights, out, settings.run.name) if comfyui else []
    adapter: LoraPath = "."
    if weights.lora is not None and any(each.shifts for each in weights.begun.values()):
        adapter = also[0] if len(also) == 1 else dict(zip(weights.modules, also, strict=True))
    else:
        write_weights(policy, weights, out)
    with policy.call_overrides(**settings.eval.call):
        call = policy.call
        with policy.limited(_adapter_steps(settings), weights.enable_training):
            samples = policy.generate(rows)
        sampling = sampler_settings(policy, settings, weights.lora)
    rates = sampling_rate(policy.pipe) or SAMPLING_RATE, frame_rate(policy.pipe, call)
    files = [save_sample(sample, out / f"sample-{row.seed}", *rates) for row, sample in zip(rows, samples, strict=True)]
    shown = [_with_before(run, row, file) for row, file in zip(rows, files, strict=True)]
    (out / SAMPLER).write_text(json.dumps(sampling, indent=1) + "\n", encoding="utf-8")
    card = _card(run, settings, policy=policy, adapter=adapter, step=step, call=call, samples=shown, comfyui=also)
    (out / "README.md").write_text(card, encoding="utf-8")
    kind = "full" if weights.lora is None else "lora"
    return Exported(folder=out, step=step, kind=kind, samples=[file.name for file in files], comfyui=also)


def sampler_settings(
    policy: DiffusersPolicy, settings: Config, adapters: Mapping[str, LoraConfig] | None
) -> dict[str, Any]:
    """Return the current sampling settings of a policy, for other programs (`sampler.json`).

    `adapters` has the adapter configs of the policy's networks, by name; None if every weight was trained.

    Returns:
        A map with, among others: `sampler`, always Euler's method; `sigmas` of the first sample, descending to 0;
            `call`, the pipeline's arguments; `scheduler`, the shifts of the stock scheduler; `lora`, None or a map of
            its strength, largest rank, alpha (of new adapters) and `eval.adapter_steps`; `frame_rate`, for videos.
    """
    config, call = policy.stock_scheduler.config, policy.call
    return {
        "pipeline": type(policy.pipe).__name__,
        "base_model": settings.model.path,
        **({"variant": settings.model.variant} if settings.model.variant else {}),
        "dtype": settings.model.dtype,
        "quantise": settings.model.quantise,
        "lora": None if adapters is None else _lora_settings(settings, adapters),
        "sampler": "euler",
        "scheduler": {key: config[key] for key in SHIFTS if config.get(key) is not None},
        "call": call,
        **({"frame_rate": frame_rate(policy.pipe, call)} if modality_of(type(policy.pipe)) == "video" else {}),
        "sigmas": list(policy.sigmas),
    }


def _lora_settings(settings: Config, adapters: Mapping[str, LoraConfig]) -> dict[str, Any]:
    lora, part = settings.model.lora, settings.eval.adapter_steps
    assert lora is not None
    rank = max(rank for each in adapters.values() for rank in (each.r, *(each.rank_pattern or {}).values()))
    # The layers of a LoRA from `lora.path` may have unequal alphas; they are in the header of its file.
    alpha = {"alpha": lora.alpha} if lora.path is None else {}
    return {"rank": rank, **alpha, "strength": 1.0} | ({"adapter_steps": part} if part else {})


def _with_before(run: Path, row: Row, file: Path) -> Shown:
    """Return a sample for the model card; copy the run's sample from before training, if it was kept, beside `file`."""
    kept = model_card.before(run, row)
    if kept is None:
        return Shown(row, file.name)
    before = file.with_name(f"before-{row.seed}{kept.suffix}")
    shutil.copy(kept, before)
    return Shown(row, file.name, before.name)


def encoders_to_save(model: Model) -> str:
    """Return `model.text_encoders` for a policy that will be saved: `offload` in place of `free`."""
    return "offload" if model.text_encoders == "free" else model.text_encoders


def write_weights(policy: DiffusersPolicy, weights: Weights, out: Path) -> None:
    """Write the current weights in diffusers' format."""
    pipe = policy.pipe
    if weights.lora is not None:
        layers: dict[str, torch.Tensor] = {}
        metadata: dict[str, Any] = {}
        for name in weights.modules:
            state = {k: v.float().cpu() for k, v in weights.adapter_state(name).items()}
            layers |= LoraBaseMixin.pack_weights(state, name)
            metadata |= {f"{name}.{key}": value for key, value in weights.lora[name].to_dict().items()}
        LoraBaseMixin.write_lora_layers(layers, str(out), True, None, None, True, metadata)
        return
    pipe.scheduler = policy.stock_scheduler
    try:
        with policy.embeddings.at_hand(), load.without_progress_bars("diffusers", "transformers"):
            pipe.save_pretrained(out)
    finally:
        pipe.scheduler = policy.scheduler


def _card(
    run: Path,
    settings: Config,
    *,
    policy: DiffusersPolicy,
    adapter: LoraPath,
    step: int,
    call: dict[str, Any],
    samples: list[Shown],
    comfyui: list[str],
) -> str:
    """Return the model card; `adapter` is the LoRA in the form of `model.lora.path`, where "." is the file for diffusers."""
    row, kind = samples[0].row, "full" if settings.model.lora is None else "lora"
    given = {name for s in samples for name, value in s.row.columns.items() if conditions.is_file_name(value)}
    task = task_of(type(policy.pipe), given & policy.takes)
    widget = [{"text": s.row.prompt, "output": {"url": s.after}} for s in samples]
    return model_card.text(
        model_card.heading(run, settings, library="diffusers", kind=kind, step=step, task=task, widget=widget),
        snippet=_snippet(policy, settings, adapter=adapter, call=call, row=row),
        command=_command(settings, adapter, call=call, row=row),
        made="sample",
        samples=[Shown(s.row, _format_file(s.after), s.before and _format_file(s.before)) for s in samples],
        notes=_notes(comfyui, settings.eval.adapter_steps, kind),
    )


def _notes(comfyui: list[str], part: Sequence[float] | None, kind: str) -> list[str]:
    lines = [f"For other programs `{SAMPLER}` lists the exact settings: Euler's method over its sigmas, and the call."]
    if part is not None:
        base = f"on the part {part_text(part)} of the steps; the model from before training took the others."
        lines.append(
            f"The adapters act {base} So were the samples here made, and the held-out rewards measured."
            if kind == "lora"
            else f"The held-out rewards were measured with these weights {base} The samples here are of these weights alone."
        )
    if comfyui:
        lines.append(
            f"ComfyUI: put {', '.join(map(markdown.span, comfyui))} into `models/loras`, load with LoraLoaderModelOnly at "
            "strength 1, and sample by `euler` over the same sigmas."
        )
    return ["", *lines, ""]


def _format_file(file: str) -> str:
    suffix = suffixes.suffix_of(file)
    if suffix in suffixes.SOUNDS:
        return f'<audio controls src="{file}">[{file}]({file})</audio>'
    if suffix in suffixes.FILMS:
        return f'<video controls loop src="{file}">[{file}]({file})</video>'
    return f"![]({file})"


def _command(settings: Config, adapter: LoraPath, *, call: dict[str, Any], row: Row) -> str:
    model, part = settings.model, _adapter_steps(settings)
    given = [name for name, value in row.columns.items() if value is not None and name != "sampling_rate"]
    lora = adapter if isinstance(adapter, str) else model_card.format_value(adapter)
    line = model_card.command(
        [
            *("flowgrpo", "sample"),
            *(["."] if model.lora is None else [model.path, "--adapter", lora]),
            *(["--prompts", "rows.jsonl"] if given else ["--prompt", row.prompt, "--seed", str(row.seed)]),
            *("--dtype", model.dtype, *(["--quantise", model.quantise] if model.quantise else [])),
            *(["--variant", model.variant] if model.variant else []),
            *(["--adapter-steps", part_text(part)] if part else []),
            *("--out", "samples"),
            *(f"{key}={model_card.format_value(value)}" for key, value in call.items()),
        ]
    )
    return f"# rows.jsonl holds a line with {', '.join(map(json.dumps, ['prompt', *given]))}\n{line}" if given else line


def _adapter_steps(settings: Config) -> list[float] | None:
    """Return the part of the schedule that adapters act on; None for the whole schedule, or without adapters."""
    return None if settings.model.lora is None else settings.eval.adapter_steps


def _snippet(policy: DiffusersPolicy, settings: Config, *, adapter: LoraPath, call: dict[str, Any], row: Row) -> str:
    model, limits = settings.model, _adapter_steps(settings)
    source, name = model.path, type(policy.pipe).__name__
    absent = "".join(f", {part}=None" for part in load.absent_components(source))
    euler = not isinstance(policy.stock_scheduler, FlowMatchEulerDiscreteScheduler)
    lines = ["import torch", f"from diffusers import {', '.join(['FlowMatchEulerDiscreteScheduler'] * euler + [name])}"]
    given = {k: v for k, v in row.columns.items() if k in policy.takes and v is not None}
    files = [v for v in given.values() if conditions.is_file_name(v)]
    lines += ["from flowgrpo.conditions import loaded"] * bool(files)
    lines += ["from flowgrpo.training.weights.quantisation import quantise"] * (model.quantise is not None)
    lines += ["from flowgrpo.flow.model.initial_lora import load_lora"] * (adapter != ".")
    lines += ["from flowgrpo.flow.pipeline.adapter_steps import limit_adapters"] * (limits is not None)
    place = repr("." if model.lora is None else source)
    if model.lora is not None and source in EMBEDDED:
        lines.append("from flowgrpo.data.embedded import EMBEDDED")
        place = f"EMBEDDED[{source!r}].folder"
    lines.append("")
    variant = f", variant={model.variant!r}" if model.variant else ""
    lines.append(f"pipe = {name}.from_pretrained({place}, dtype=torch.{model.dtype}{variant}{absent})")
    if adapter != ".":
        lines.append(f"load_lora(pipe, {place}, {adapter!r})")
    elif model.lora is not None:
        by_pipeline = traits.loads_lora(policy.pipe)
        lines += ['pipe.load_lora_weights(".")  # this folder'] * by_pipeline
        others = [name for name in policy.modules if not by_pipeline or name != "transformer"]
        lines += [f'pipe.{name}.load_lora_adapter(".", prefix="{name}")' for name in others]
    lines += [f"quantise(pipe.{network}, {model.quantise!r})" for network in policy.modules if model.quantise]
    if limits is not None:
        lines.append(f"limit_adapters(pipe, {limits[0]!r}, {limits[1]!r})")
    if euler:  # the policy takes Euler steps, whatever solver the model ships with
        shift = policy.scheduler.config.shift
        lines.append(f"pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift={shift})")
    written = {k: f"loaded({v!r})" if conditions.is_file_name(v) else repr(v) for k, v in given.items()}
    arguments = ", ".join(f"{k}={v}" for k, v in ({k: repr(v) for k, v in call.items()} | written).items())
    made = modality_of(type(policy.pipe))
    output = {"image": "images", "video": "frames", "audio": "audios"}[made]
    seeded = f"generator=torch.Generator().manual_seed({row.seed})"
    lines.append(f"{made} = pipe(prompt={row.prompt!r}, {seeded}, {arguments}).{output}[0]")
    return "\n".join(lines)
