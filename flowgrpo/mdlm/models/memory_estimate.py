"""Lower bound of a language model run's memory; see `flowgrpo.flow.model.memory_estimate`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.models import initial_lora
from flowgrpo.mdlm.models.load import config_of, model_paths
from flowgrpo.mdlm.models.released_names import is_released
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.model_files.hub_files import one_sentence, shapes
from flowgrpo.training.planning.memory_estimate import refuse
from flowgrpo.training.planning.reward_memory import reward_bytes
from flowgrpo.training.weights import quantisation, sharding
from flowgrpo.training.weights.optimizers import OPTIMIZERS
from flowgrpo.training.weights.trained_weights import adapter_size
from rewards.compute import DTYPES

if TYPE_CHECKING:
    from flowgrpo.mdlm.models import architectures
else:
    architectures = lazy("flowgrpo.mdlm.models.architectures")


def memory_estimate(config: TextConfig, *, among: int = 1) -> dict[str, int]:
    """Return lower bounds of a process's memory in bytes: `gpu_bytes` on its device, `host_bytes` in host memory.

    `reward_bytes` are those of `gpu_bytes` that the weights of rewards take. `among` processes share a model; each loads
    it whole into host memory. Raises InputError if there is no such model.
    """
    model, train = config.model, config.train
    place, _ = model_paths(model.path)
    if is_released(config_of(place)):
        sizes = architectures.shapes(model.path, place)
    else:
        with one_sentence(model.path):
            sizes = shapes(place, variant=model.variant)
    loaded = quantisation.size(sizes, torch.finfo(DTYPES[model.dtype]).bits // 8, model.quantise)
    if model.lora is None:  # trained in float32
        frozen, trained = 0, sum(map(math.prod, sizes.values()))
    else:
        begun = initial_lora.read(model)
        frozen, trained = loaded, adapter_size(sizes, model.lora) if begun is None else begun.size
    copies = 2 + (train.ema is not None) + policy_copies(config)  # 2 for the weights and their gradients
    learnt = round(trained * (4 * copies + OPTIMIZERS[train.optimizer.name].bytes_per_number))
    rewards = reward_bytes(config)
    held, host = max(loaded, frozen + learnt), 0
    if among > 1:
        held, host = frozen // among + learnt // (among if model.lora is None else 1), loaded
    return {"gpu_bytes": held + rewards, "reward_bytes": rewards, "host_bytes": host}


def policy_copies(config: TextConfig) -> int:
    """Return how many further copies of the trained weights are kept: 1 for a reference other than the frozen base."""
    lora, reference = config.model.lora, config.algorithm.reference
    begun = lora is None or (lora.path is not None and reference == "fixed")
    return int(begun and reference is not None)


def check(config: TextConfig, device: torch.device) -> None:
    """Raise InputError for a run that cannot fit, before its weights load."""
    refuse(config, device, lambda other: memory_estimate(other, among=sharding.among(other.run.sharding)))
