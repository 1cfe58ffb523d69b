"""From what a user wrote to what runs: pipelines, policies, weights and rewards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.utils import cached_file

from flowgrpo import switches, tables, traits
from flowgrpo.config import Config, Model
from flowgrpo.errors import InputError, nearest
from flowgrpo.mdlm.loading import BUILT_IN as TEXT_MODELS
from flowgrpo.mdlm.loading import PIPELINE
from flowgrpo.modality import SAMPLING_RATE, sampling_rate
from flowgrpo.policy import DiffusersPolicy
from flowgrpo.progress import without_progress_bars
from flowgrpo.prompts import Prompt
from flowgrpo.sections import Ema, RewardUse
from flowgrpo.shapes import BUILT_IN
from flowgrpo.weights import Weights, lora_config
from rewards import Reward, RewardError
from rewards import load as load_reward
from rewards.heap import keep_freed_memory

LORA_FILE = "pytorch_lora_weights.safetensors"
HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"


def load_pipeline(path: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """The stock pipeline of a built-in name, a local folder or a hub id.

    Raises:
        InputError: there is no such model, or it cannot be loaded.
    """
    absent = dict.fromkeys(absent_components(path))
    with explained(path), without_progress_bars():
        return DiffusionPipeline.from_pretrained(place_of(path), dtype=dtype, **absent)


def load_lora(pipe: DiffusionPipeline, folder: Path) -> None:
    """Load what `flowgrpo export` wrote into a stock pipeline, by its own method, and then into what that left out."""
    if traits.loads_lora(pipe):
        before = diffusers_logging.get_verbosity()
        diffusers_logging.set_verbosity_error()  # it warns of each component that the file has nothing for
        pipe.load_lora_weights(str(folder))
        diffusers_logging.set_verbosity(before)
    with safe_open(folder / LORA_FILE, "pt") as file:
        names = {key.split(".")[0] for key in file.keys()}  # noqa: SIM118 - the file is no mapping
    for name in sorted(names):
        module = getattr(pipe, name)
        if getattr(module, "peft_config", None):
            continue
        if hasattr(module, "load_lora_adapter"):
            module.load_lora_adapter(str(folder), prefix=name, weight_name=LORA_FILE)
        else:
            _inject(module, folder / LORA_FILE, name)


def _inject(module: torch.nn.Module, file: Path, prefix: str) -> None:
    """What `load_lora_adapter` does, for a model that has none."""
    with safe_open(file, "pt") as opened:
        config = json.loads(opened.metadata()["lora_adapter_metadata"])
    own = {key.removeprefix(f"{prefix}."): value for key, value in config.items() if key.startswith(f"{prefix}.")}
    inject_adapter_in_model(LoraConfig(**own), module)
    tensors = {key.removeprefix(f"{prefix}."): t for key, t in load_file(file).items() if key.startswith(f"{prefix}.")}
    set_peft_model_state_dict(module, tensors)
    module.to(next(module.parameters()).dtype)


def index_of(path: str) -> dict[str, Any]:
    """A model's index (model_index.json): its class and its components, without their weights.

    Raises:
        InputError: there is no such model.
    """
    place = place_of(path)
    if path in TEXT_MODELS:
        raise InputError(f"model.path: {path} is a language model, set kind: mdlm")
    if not Path(place).is_dir() and not re.fullmatch(HUB_ID, place):
        raise InputError(
            f"model.path: there is no folder {path!r} and no built-in model of that name, {nearest(path, BUILT_IN)}"
        )
    if Path(place).is_dir() and not (Path(place) / "model_index.json").is_file():
        hint = "; for a language model set kind: mdlm" if (Path(place) / "config.json").is_file() else ""
        raise InputError(f"model.path: {path} is no diffusers pipeline, it has no model_index.json{hint}")
    with explained(path):
        return _map(DiffusionPipeline.load_config(place))


def scheduler_config(path: str) -> dict[str, Any] | None:
    """The configuration of a model's scheduler; None unless it is `FlowMatchEulerDiscreteScheduler`."""
    _, name = index_of(path).get("scheduler", (None, None))
    if name != FlowMatchEulerDiscreteScheduler.__name__:
        return None
    with explained(path):
        return dict(FlowMatchEulerDiscreteScheduler.load_config(place_of(path), subfolder="scheduler"))


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
        return "mdlm" if _map(tables.document(Path(index))).get("_class_name") == PIPELINE else "flow"


def _map(written: Any) -> dict[str, Any]:
    """What a model's index is, as long as it is what diffusers writes."""
    if not isinstance(written, dict) or not isinstance(written.get("_class_name", ""), str):
        raise ValueError("its model_index.json is no map with the name of a class")
    return dict(written)


def absent_components(path: str) -> list[str]:
    """Components that a saved pipeline was without (SD3 without T5): diffusers wants to be told so again."""
    return [
        name for name, kind in index_of(path).items() if isinstance(kind, (list, tuple)) and list(kind) == [None, None]
    ]


def place_of(path: str) -> str:
    """The folder of a built-in model; any other path as it is."""
    return str(BUILT_IN[path][0]) if path in BUILT_IN else path


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn what diffusers raises about a model that cannot be read, which may be anything, into one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        where = "its folder" if Path(place_of(path)).is_dir() else "the model hub"
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"model.path: {path} could not be loaded from {where} ({type(error).__name__}: {reason})"
        ) from error


def load_policy(
    path: str,
    dtype: str = "float32",
    call: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> DiffusersPolicy:
    """A pipeline as a policy; see `DiffusersPolicy` for `options`.

    Args:
        path: a built-in name, a local folder or a hub id.
        dtype: `float32`, `bfloat16` or `float16`.
        call: arguments for the pipeline's call; a built-in model has defaults.
        device: by default the first GPU, if there is one.
    """
    pipe = load_pipeline(path, getattr(torch, dtype))
    pipe.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if pipe.device.type == "cpu":
        keep_freed_memory()
    return DiffusersPolicy(pipe, {**(BUILT_IN[path][1] if path in BUILT_IN else {}), **(call or {})}, **options)


def policy_and_weights(config: Config, device: torch.device) -> tuple[DiffusersPolicy, Weights]:
    """The policy of a config, with its switches set and its trainable weights in place."""
    model = config.model
    switches.check(model, device)
    full_in_half = model.lora is None and model.dtype != "float32"  # weights in float32, computing in half precision
    policy = load_policy(
        model.path,
        model.dtype,
        model.call,
        device,
        autocast=getattr(torch, model.dtype) if full_in_half else None,
        text_encoders=model.text_encoders,
    )
    switches.apply(model, policy)
    kl = config.algorithm.objective.kl
    return policy, trainable(model, policy, config.train.ema, kl.reference if kl.beta > 0 else None, kl.refresh)


def trainable(
    model: Model, policy: DiffusersPolicy, ema: Ema | None, reference: str | None = None, refresh: int = 1
) -> Weights:
    """Unfreeze what a config trains: adapters on the policy's modules, or the modules whole; see `Weights`."""
    lora = model.lora and lora_config(model.lora.rank, model.lora.alpha, model.lora.targets, policy.modules)
    return Weights(policy.modules, lora, ema, reference, refresh)


def rewards(uses: Sequence[RewardUse], eval_uses: Sequence[RewardUse] = ()) -> tuple[list[Reward], list[Reward]]:
    """Training and evaluation rewards of a config.

    Raises:
        RewardError: one cannot be found, or two share a name.
    """
    found = [
        [replace(load_reward(use.use, use.weight, use.options, use.name), only=use.only) for use in part]
        for part in (uses, eval_uses)
    ]
    names = [reward.name for part in found for reward in part]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"two rewards are named {name!r}: give one of them another name, {{use: ..., name: ...}}")
    return found[0], found[1]


def with_sampling_rate(prompts: Sequence[Prompt], policy: DiffusersPolicy) -> list[Prompt]:
    """Prompts with the column `sampling_rate` that rewards of audio receive; as they are for other modalities."""
    rate = sampling_rate(policy.pipe)
    return [replace(p, columns={**p.columns, "sampling_rate": rate}) for p in prompts] if rate else list(prompts)


def tried(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> Iterator[tuple[Reward, Prompt]]:
    """Each reward with the first prompt that it is for; not those that are for none."""
    for reward in rewards:
        first = next((prompt for prompt in prompts if reward.applies(prompt.columns)), None)
        if first is not None:
            yield reward, first


def check_rewards(rewards: Sequence[Reward], prompts: Sequence[Prompt], shape: Sequence[int]) -> None:
    """Call every reward on two synthetic samples of the first prompt that it is for.

    Args:
        shape: of one sample: an image (3, H, W), a video (F, 3, H, W) or audio (C, N); see `modality.expected_shape`.

    Raises:
        RewardError: a reward fails, or breaks the contract.
    """
    sample, own = _synthetic(shape), {"sampling_rate": SAMPLING_RATE} if len(shape) == 2 else {}
    for reward, prompt in tried(rewards, prompts):
        reward.check(sample, prompt.text, {**own, **prompt.columns})


def _synthetic(shape: Sequence[int]) -> torch.Tensor:
    """Colour ramps, which wander in a video of 8 frames at most, or a tone."""
    if len(shape) == 2:
        channels, length = shape
        return 0.5 * torch.linspace(0, 880 * torch.pi, length).sin().expand(channels, length)
    *frames, _, height, width = shape
    ramp = torch.linspace(0, 1, width).expand(height, width)
    picture = torch.stack([ramp, ramp.flip(1), torch.full((height, width), 0.5)])
    return torch.stack([picture.roll(i, -1) for i in range(min(frames[0], 8))]) if frames else picture
