"""Export of a language model's trained weights in the formats of peft and transformers, with a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowgrpo.data import prompts
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import DIGITS, TextConfig, TextModel
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy, apply_actions
from flowgrpo.mdlm.models.architectures import copy_beside, released_paths
from flowgrpo.mdlm.models.load import check_weights, config_of, model_paths
from flowgrpo.mdlm.models.lora_targets import layers, write_adapter
from flowgrpo.mdlm.models.released_names import is_released
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.setup import policy_and_weights
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.lora import lora_files, lora_layers
from flowgrpo.training.model_files.hub_files import without_progress_bars
from flowgrpo.training.reports import markdown, model_card
from flowgrpo.training.reports.model_card import SAMPLES, Exported, Shown
from flowgrpo.training.reports.samples import Text, save_sample
from flowgrpo.training.weights.trained_weights import Weights
from rewards.compute import default_device

SCHEDULE_FILE = "schedule.safetensors"


def check(settings: TextConfig, run: Path, found: Path, *, comfyui: bool) -> None:
    """Check that an export is possible, as far as this can be told without loading the model.

    Raises InputError if there is no such model or no evaluation prompts, if the LoRA that the run started from contains
    full parameter differences or the run's copy of it is gone, or if `comfyui` is set (ComfyUI runs no language models).
    """
    if comfyui:
        raise InputError("--comfyui: ComfyUI runs no masked-diffusion language models; leave it out")
    model = lora_files.with_kept_lora(settings, run).model
    started = None if model.lora is None else model.lora.path
    if isinstance(started, str):
        for shifted in lora_layers.shifts_of(lora_files.read(started)):
            raise InputError(
                f"the LoRA that this run started from shifts {shifted}, which peft's file cannot hold; train with "
                "model.merge in its place"
            )
    check_weights(settings.model.path, settings.model.variant)
    prompts.load_split(settings.prompts, "eval")


def export(settings: TextConfig, run: Path, found: Path, out: Path, *, comfyui: bool = False) -> Exported:
    """Write the weights of the checkpoint `found` (their average, if kept) to `out`, with a model card and sample answers.

    A LoRA becomes an adapter for `peft.PeftModel.from_pretrained(model, out)`. Full weights become a model with its
    tokenizer, in the same layout as the base model. A learned schedule goes to `schedule.safetensors`. `eval.decoder`
    answers the sample prompts one at a time. `comfyui` is always false here, since `check` refuses it.
    """
    policy, weights = policy_and_weights(lora_files.with_kept_lora(settings, run), default_device(), learns=False)
    step = checkpoint.load_averaged(found, weights)
    out.mkdir(parents=True, exist_ok=True)
    chosen = prompts.load_split(settings.prompts, "eval")[:SAMPLES]
    rows = [Row(prompt.text, i, prompt.columns) for i, prompt in enumerate(chosen)]
    write_weights(settings.model, policy, weights, out)
    decoder = settings.eval.decoder.build(policy.length, policy.eos_id, "eval.decoder", predictor=policy.predictor)
    schedule = weights.extra_modules.get("schedule")
    if isinstance(schedule, SchedulePolicy) and settings.eval.decoder.name == "scheduled":
        decoder = apply_actions(decoder, schedule.typical(1))
    answers = [answer(policy, row, decoder) for row in rows]
    files = [save_sample(text, out / f"sample-{row.seed}").name for row, text in zip(rows, answers, strict=True)]
    kind = "full" if weights.lora is None else "lora"
    if kind == "full":  # written without a variant
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"variant": None})})
    note = _names_note(policy.predictor.model, settings.model, weights)
    card = _card(run, settings, kind=kind, step=step, rows=rows, answers=answers, note=note)
    (out / "README.md").write_text(card, encoding="utf-8")
    return Exported(folder=out, step=step, kind=kind, samples=files)


def answer(policy: TextPolicy, row: Row, decoder: Decoder) -> Text:
    """Answer one prompt alone, with the random numbers that `TextPolicy.sample` has for the seed `row.seed`."""
    return policy.as_samples(policy.generate([row.prompt], decoder, [(row.seed,)], 1))[0]


def write_weights(model: TextModel, policy: TextPolicy, weights: Weights, out: Path) -> None:
    """Write the current weights in the format of peft (LoRA) or transformers (full), and a learned schedule."""
    network = policy.predictor.model
    with without_progress_bars("transformers"):
        if weights.lora is not None:
            write_adapter(model, network, weights, out)
        else:
            _write_model(model, policy, out)
    schedule = weights.extra_modules.get("schedule")
    if isinstance(schedule, SchedulePolicy):
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in schedule.state_dict().items()}
        save_file(state, out / SCHEDULE_FILE, {"names": json.dumps(schedule.names)})


def _write_model(model: TextModel, policy: TextPolicy, out: Path) -> None:
    """Write the model and its tokenizer; a released type keeps its own config.json, tokenizer and code."""
    network = policy.predictor.model
    model_place, tokenizer_place = model_paths(model.path)
    is_pipeline, released = model_place != tokenizer_place, is_released(config_of(model_place))
    if is_pipeline:  # copy its other parts
        ignore = shutil.ignore_patterns("model", "tokenizer")
        shutil.copytree(Path(model_place).parent, out, ignore=ignore, dirs_exist_ok=True)
    model_out, tokenizer_out = (out / "model", out / "tokenizer") if is_pipeline else (out, out)
    network.save_pretrained(model_out)
    if released:
        copy_beside(model_place, model_out, network.dtype)
    if not released or is_pipeline:
        policy.tokenizer.save_pretrained(tokenizer_out)


def with_schedule(decoder: Decoder, folder: Path, count: int = 1) -> Decoder:
    """Return the decoder with the median actions of the schedule in `folder`; raise InputError if it lacks a setting."""
    with safe_open(folder / SCHEDULE_FILE, "pt") as file:
        names = json.loads(file.metadata()["names"])
    state = load_file(folder / SCHEDULE_FILE)
    schedule = SchedulePolicy(dict.fromkeys(names, 0.5), len(state["mean"]))  # within the bounds of every action
    schedule.load_state_dict(state)
    return apply_actions(decoder, schedule.typical(count))


def _names_note(network: torch.nn.Module, model: TextModel, weights: Weights) -> str:
    """Return the card's note on the tensor names of a released model; "" for other models."""
    if not is_released(config_of(model_paths(model.path)[0])):
        return ""
    if weights.lora is None:
        return "Names, config.json and code are those of the base model, for its own code and for flowgrpo.\n"
    if released_paths(network, layers(weights)):
        return (
            "The adapter's names are those of the base model's own code; there `PeftModel.from_pretrained` loads it.\n"
        )
    base = type(network).__bases__[0].__name__
    return (
        f"The adapter's names are those of transformers' {base}: the base model's own code keeps "
        "in one matrix what the adapter has in parts, so that flowgrpo alone loads it.\n"
    )


def _card(
    run: Path, settings: TextConfig, *, kind: str, step: int, rows: Sequence[Row], answers: Sequence[Text], note: str
) -> str:
    library = "peft" if kind == "lora" else "transformers"
    texts = [model_card.before(run, row) for row in rows]
    befores = [None if file is None else json.loads(file.read_text(encoding="utf-8"))["text"] for file in texts]
    widget = [{"text": row.prompt, "output": {"text": a.text}} for row, a in zip(rows, answers, strict=True)]
    head = model_card.heading(
        run, settings, library=library, kind=kind, step=step, task="text-generation", widget=widget
    )
    return model_card.text(
        [*head, *([note] if note else [])],
        snippet=_snippet(settings, kind, rows[0]),
        command=_command(settings, kind, rows[0]),
        made="answer",
        samples=[
            Shown(row, markdown.escape(a.text), None if old is None else markdown.escape(old))
            for row, a, old in zip(rows, answers, befores, strict=True)
        ],
    )


def _loading(model: TextModel) -> dict[str, Any]:
    """Return the options of `load_predictor` that the config sets, other than dtype, quantise and variant."""
    trusted = model.trust_remote_code or None
    keys = ("mask_id", "shift", "attention", "block_size")
    options = {"trust_remote_code": trusted, **{key: getattr(model, key) for key in keys}}
    return {key: value for key, value in options.items() if value is not None}


def _dtype(model: TextModel) -> str:
    return "float32" if model.lora is None else model.dtype


def _snippet(settings: TextConfig, kind: str, row: Row) -> str:
    model, lora, decoder = settings.model, kind == "lora", settings.eval.decoder.dump()
    learned = settings.algorithm.schedule.name != "none" and decoder["name"] == "scheduled"
    place = repr(model.path if lora else ".")
    loading = _loading(model) | {k: v for k in ("quantise", "variant") if (v := getattr(model, k)) is not None}
    options = "".join(f", {key}={value!r}" for key, value in loading.items())
    chat = ", chat=True" if model.chat else ""
    lines = [
        "from pathlib import Path" if learned or lora else "",
        "import torch",
        "from flowgrpo.mdlm.decoders import build" if learned else "",
        "from flowgrpo.mdlm.outputs.export import with_schedule" if learned else "",
        f"from flowgrpo.mdlm.models.load import {'load_adapter, ' * lora}load_predictor",
        "from flowgrpo.mdlm.policy import TextPolicy",
    ]
    lines = [line for line in lines if line]
    lines += ["", f"predictor, tokenizer = load_predictor({place}, torch.{_dtype(model)}{options})"]
    lines += ['load_adapter(predictor, Path("."))'] * lora
    lines += [f"policy = TextPolicy(predictor, tokenizer, {model.length}{chat})"]
    if learned:
        lines += [
            f'decoder = with_schedule(build({decoder!r}, policy.length, policy.eos_id, policy.predictor), Path("."))',
            f"answer = policy.generate([{row.prompt!r}], decoder, [({row.seed},)], 1).texts[0]",
        ]
    else:
        lines += [f"answer = policy.sample([{row.prompt!r}], {row.seed}, {decoder!r})[0]"]
    return "\n".join(lines)


def _command(settings: TextConfig, kind: str, row: Row) -> str:
    model = settings.model
    place = [model.path, "--adapter", "."] if kind == "lora" else ["."]
    given: dict[str, Any] = {"length": model.length} if model.path != DIGITS or kind == "full" else {}
    given |= {**_loading(model), **({"chat": True} if model.chat else {}), "decoder": settings.eval.decoder.dump()}
    options = ["--prompt", row.prompt, "--seed", str(row.seed), "--dtype", _dtype(model)]
    for option, word in {"--quantise": model.quantise, "--variant": model.variant}.items():
        options += [] if word is None else [option, word]
    options += ["--out", "samples"]
    return model_card.command(
        ["flowgrpo", "sample", *place, *options, *(f"{k}={model_card.format_value(v)}" for k, v in given.items())]
    )
