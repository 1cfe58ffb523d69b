"""A lower bound on the memory of a run, from the sizes in a model's files, without loading weights.

It counts weights, those of rewards, too, gradients, optimizer moments, the weight average, other policies and
low-precision copies. It does not count activations, which depend on the model's code; `flowgrpo doctor` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flowgrpo.data import embedded
from flowgrpo.flow.config import Config
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.networks.traits import ENCODERS, TRAINED, is_network
from flowgrpo.training.model_files import hub_files
from flowgrpo.training.model_files.hub_files import Shape, shapes
from flowgrpo.training.planning.memory_estimate import refuse, smaller
from flowgrpo.training.planning.reward_memory import reward_bytes
from flowgrpo.training.weights import low_precision_copies, quantisation, sharding
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.optimizers import OPTIMIZERS
from flowgrpo.training.weights.trained_weights import adapter_size
from rewards.compute import DTYPES

__all__ = ["check", "component_shapes", "loading_peak", "memory_estimate", "policy_copies", "smaller"]
Components = dict[str, dict[str, Shape]]


def memory_estimate(
    config: Config,
    components: Components | None = None,
    begun: Mapping[str, Adapter] | None = None,
    *,
    among: int = 1,
) -> dict[str, int]:
    """Return the memory that a process needs: `gpu_bytes` on its device (or CPU), `host_bytes` of offloaded weights.

    `reward_bytes` are those of `gpu_bytes` that the weights of rewards take. `components` and `begun` are the results of
    `component_shapes` and `initial_lora.adapters`, if known. The weights are sharded over `among` processes. Raise
    InputError if there is no such model.
    """
    model, train = config.model, config.train
    components = component_shapes(model.path, variant=model.variant) if components is None else components
    width = torch.finfo(DTYPES[model.dtype]).bits // 8
    numel = {name: sum(math.prod(shape) for shape in each.values()) for name, each in components.items()}
    encoders = {name for name in numel if name.startswith(ENCODERS)} if model.text_encoders != "keep" else set()
    away = encoders | ({"vae"} & numel.keys() if model.vae == "offload" else set())
    on_host = away - (encoders if model.text_encoders == "free" else set())
    networks = {name: each for name, each in components.items() if name.startswith(TRAINED)}
    frozen = sum(count for name, count in numel.items() if name not in away)
    base = sum(numel[name] for name in networks)
    if model.lora is None:  # trained in float32
        frozen, trained = frozen - base, base
    else:
        frozen += base * config.exchanges_base
        begun = initial_lora.adapters(model) if begun is None else begun
        tensors = {f"{name}.{key}": shape for name, each in networks.items() for key, shape in each.items()}
        trained = sum(each.size for each in begun.values()) if begun else adapter_size(tensors, model.lora)
    copies = 2 + (train.ema is not None) + policy_copies(config)  # weight, gradient, average, other policies
    moments = OPTIMIZERS[train.optimizer.name].bytes_per_number
    shapes_of = list(networks.values())
    held = [quantisation.size(each, width, model.quantise) // (among if model.lora else 1) for each in shapes_of]
    saved = sum(quantisation.size(each, width, None) for each in shapes_of) - sum(held)
    training = frozen * width + round(trained * (4 * copies + moments)) // (1 if model.lora else among) - saved
    words, of_linear = low_precision_copies.of_copies(config), width if model.lora else 4
    copied = sum(low_precision_copies.size(each, of_linear, word) for each in shapes_of for word in words)
    rewards = reward_bytes(config)
    return {
        "gpu_bytes": max(loading_peak(config, components), training + copied) + rewards,
        "reward_bytes": rewards,
        "host_bytes": width * sum(numel[name] for name in on_host),
    }


def policy_copies(config: Config) -> int:
    """Return the number of other policies that are copies of the trained weights: reference, old policy, snapshots."""
    algorithm, lora, reference = config.algorithm, config.model.lora, config.algorithm.reference
    copied = lora is None or reference == "moving"
    copied |= reference == "fixed" and lora is not None and lora.path is not None  # else it is the base
    copied |= reference == "teacher" and not config.exchanges_base
    return (reference is not None and copied) + (algorithm.old is not None) + algorithm.snapshots


def loading_peak(config: Config, components: Components) -> int:
    """Return the bytes of weights on the device while prompts are encoded: of all components that do not load later."""
    model = config.model
    width = torch.finfo(DTYPES[model.dtype]).bits // 8
    later = model.text_encoders != "keep" and load.loads_later(model.path)
    return sum(
        quantisation.size(each, width, model.quantise if name.startswith(TRAINED) else None)
        for name, each in components.items()
        if not (later and is_network(name))
    )


def check(config: Config, device: torch.device, begun: Mapping[str, Adapter] | None = None) -> None:
    """Raise InputError, before weights load, if a run cannot fit into memory; `begun` as in `memory_estimate`."""
    components = component_shapes(config.model.path, variant=config.model.variant)
    begun = initial_lora.adapters(config.model) if begun is None else begun
    refuse(
        config,
        device,
        lambda other: memory_estimate(other, components, begun, among=sharding.among(other.run.sharding)),
    )


def component_shapes(path: str, beginning: str | tuple[str, ...] = "", variant: str | None = None) -> Components:
    """Return the tensor shapes of the components whose names start with `beginning`, from weight files.

    Raise InputError if there is no such model.
    """
    components = [name for name in load.components_of(path) if name.startswith(beginning)]
    source = embedded.place_of(path)
    with hub_files.one_sentence(path):
        by_component = {name: shapes(source, name, variant) for name in components}
    return {name: each for name, each in by_component.items() if each}
