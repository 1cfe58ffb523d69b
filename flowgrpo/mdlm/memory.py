"""Memory that a run of a language model needs at the least; see `flowgrpo.flow.memory`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.loading import config_of, model_paths
from flowgrpo.mdlm.released import is_released
from flowgrpo.schema.lazy import lazy
from flowgrpo.training import quantise
from flowgrpo.training.hub import one_sentence, refuse_too_large, shapes
from flowgrpo.training.optimizers import OPTIMIZERS
from flowgrpo.training.weights import adapter_size
from rewards.compute import DTYPES

if TYPE_CHECKING:
    from flowgrpo.mdlm import architectures
else:
    architectures = lazy("flowgrpo.mdlm.architectures")


def memory_estimate(config: TextConfig) -> dict[str, int]:
    """Bytes a process needs: `gpu_bytes` on its device (the host itself on a CPU), and no `host_bytes` beside it.

    Raises:
        InputError: there is no such model.
    """
    model, train, kl = config.model, config.train, config.algorithm.objective.kl
    place, _ = model_paths(model.path)
    if is_released(config_of(place)):
        sizes = architectures.shapes(model.path, place)
    else:
        with one_sentence(model.path):
            sizes = shapes(place)
    width = torch.finfo(DTYPES[model.dtype]).bits // 8
    copies = 2 + (train.ema is not None)  # the weight, its gradient, the average
    moments = OPTIMIZERS[train.optimizer.name].bytes_per_number
    if model.lora is not None:
        frozen, trained = quantise.size(sizes, width, model.quantise), adapter_size(sizes, model.lora)
    else:  # trained in float32
        frozen, trained = 0, sum(map(math.prod, sizes.values()))
        copies += kl.beta > 0 and kl.target == "reference"
    return {"gpu_bytes": frozen + round(trained * (4 * copies + moments)), "host_bytes": 0}


def check(config: TextConfig, device: torch.device) -> None:
    """Refuse a run that cannot fit, before its weights are loaded.

    Raises:
        InputError: there is no such model, or the estimate is more than the device, or this machine, has.
    """
    refuse_too_large(config.model.path, memory_estimate(config), device, "model.dtype=bfloat16 or model.quantise=int8")
