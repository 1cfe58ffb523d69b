"""Memory that a run of a language model needs at the least; see `flowgrpo.flow.model.memory_estimate`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.models import initial_lora
from flowgrpo.mdlm.models.load import config_of, model_paths
from flowgrpo.mdlm.models.released_names import is_released
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.lora import Lora
from flowgrpo.training.model_files.hub_files import one_sentence, refuse_too_large, shapes
from flowgrpo.training.weights import quantisation, sharding
from flowgrpo.training.weights.optimizers import OPTIMIZERS
from flowgrpo.training.weights.trained_weights import adapter_size
from rewards.compute import DTYPES

if TYPE_CHECKING:
    from flowgrpo.mdlm.models import architectures
else:
    architectures = lazy("flowgrpo.mdlm.models.architectures")


def memory_estimate(config: TextConfig, *, among: int = 1) -> dict[str, int]:
    """Bytes a process needs: `gpu_bytes` on its device (the host itself on a CPU), and `host_bytes` beside the device.

    Args:
        among: how many processes share the model, which each loads whole into host memory.

    Raises:
        InputError: there is no such model.
    """
    model, train, kl = config.model, config.train, config.algorithm.objective.kl
    place, _ = model_paths(model.path)
    if is_released(config_of(place)):
        sizes = architectures.shapes(model.path, place)
    else:
        with one_sentence(model.path):
            sizes = shapes(place, variant=model.variant)
    width = torch.finfo(DTYPES[model.dtype]).bits // 8
    copies = 2 + (train.ema is not None)  # the weight, its gradient, the average
    moments = OPTIMIZERS[train.optimizer.name].bytes_per_number
    if model.lora is not None:
        begun = initial_lora.read(model)
        frozen = quantisation.size(sizes, width, model.quantise)
        trained = adapter_size(sizes, model.lora) if begun is None else begun.size
        copies += begun is not None and kl.reference == "fixed"
    else:  # trained in float32
        frozen, trained = 0, sum(map(math.prod, sizes.values()))
        copies += kl.reference is not None
    learnt = round(trained * (4 * copies + moments))
    loaded = quantisation.size(sizes, width, model.quantise)
    if among > 1:
        return {"gpu_bytes": frozen // among + learnt // (among if model.lora is None else 1), "host_bytes": loaded}
    return {"gpu_bytes": max(loaded, frozen + learnt), "host_bytes": 0}


def check(config: TextConfig, device: torch.device) -> None:
    """Refuse a run that cannot fit, before its weights are loaded.

    Raises:
        InputError: there is no such model, or the estimate is more than the device, or this machine, has.
    """

    def need(other: TextConfig) -> dict[str, int]:
        return memory_estimate(other, among=sharding.among(other.run.sharding))

    refuse_too_large(
        config.model.path, need(config), device, lambda: {key: need(other) for key, other in smaller(config)}
    )


def smaller(config: TextConfig) -> Iterator[tuple[str, TextConfig]]:
    """Yield settings that may need less memory, as one writes them, and the config with each; some may be made already."""
    quantised = [("quantise", form) for form in quantisation.FORMS] if config.model.lora else [("lora", Lora())]
    for key, value in (*quantised, ("dtype", "bfloat16")):
        model = config.model.model_copy(update={key: value})
        yield f"model.{key}={'{}' if key == 'lora' else value}", config.model_copy(update={"model": model})
    train = config.train.model_copy(update={"ema": None})
    if sharding.can(config):
        run = config.run.model_copy(update={"sharding": "fsdp2"})
        yield "run.sharding=fsdp2", config.model_copy(update={"run": run})
    yield "train.ema=null", config.model_copy(update={"train": train})
