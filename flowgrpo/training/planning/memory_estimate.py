"""Refusal of a model that cannot fit into memory, before its weights load, with settings that need less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flowgrpo.schema.lora import Lora
from flowgrpo.training.model_files.hub_files import refuse_too_large
from flowgrpo.training.planning.memory_phases import Config, with_setting
from flowgrpo.training.weights import low_precision_copies, quantisation, sharding

if TYPE_CHECKING:
    import torch


def refuse(config: Config, device: torch.device, need: Callable[[Config], dict[str, int]]) -> None:
    """Raise InputError for a run that needs more memory than the device, or this machine, has.

    `need` returns the `gpu_bytes`, `reward_bytes` and `host_bytes` that a config needs.
    """
    refuse_too_large(
        config.model.path, need(config), device, lambda: {key: need(other) for key, other in smaller(config)}
    )


def device_words(memory: Mapping[str, int]) -> str:
    """Return the memory on the device, and the part of it that rewards take, as a plan says it."""
    gpu, rewards = (memory[key] / 2**30 for key in ("gpu_bytes", "reward_bytes"))
    return f"{gpu:.2f} GiB on the device" + f" ({rewards:.2f} of it weights of rewards)" * bool(rewards)


def smaller(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield settings that may save memory, each as an override and as the changed config; some may be set already."""
    model, copies = config.model, low_precision_copies.of_copies(config)
    bases: list[tuple[str, Any]] = [("model.quantise", form) for form in quantisation.FORMS]
    if model.lora is None:
        bases = [("model.lora", Lora())]
    if config.exchanges_base or (copies and model.lora is not None):  # these need an unquantised base
        bases = []
    settings: list[tuple[str, Any]] = [
        *([(low_precision_copies.KEY, None)] if low_precision_copies.of_drafts(config) else []),
        *([(low_precision_copies.FINISH_KEY, None)] if low_precision_copies.of_finishes(config) else []),
        *bases,
        ("model.dtype", "bfloat16"),
        ("model.text_encoders", "offload"),
        ("model.text_encoders", "free"),
        ("model.vae", "offload"),
        *([("run.sharding", "fsdp2")] if sharding.can(config) else []),
        ("train.ema", None),
    ]
    for key, value in settings:
        section, _, name = key.partition(".")
        if section != "model" or name in type(model).model_fields:
            word = "{}" if isinstance(value, Lora) else "null" if value is None else value
            yield f"{key}={word}", with_setting(config, key, value)
