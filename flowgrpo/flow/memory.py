"""Memory that a run needs at the least, from the sizes written in a model's files, without loading any weights.

Counted are weights, gradients, optimizer, average and reference. Activations come on top and depend on the model's code:
`flowgrpo doctor` measures them.
"""

from __future__ import annotations

import math

import torch

from flowgrpo.data import embedded
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline import loading
from flowgrpo.flow.pipeline.traits import TRAINED
from flowgrpo.training import hub, quantise
from flowgrpo.training.hub import Shape, refuse_too_large, shapes
from flowgrpo.training.optimizers import OPTIMIZERS
from flowgrpo.training.weights import adapter_size
from rewards.compute import DTYPES


def memory_estimate(config: Config) -> dict[str, int]:
    """Bytes a process needs: `gpu_bytes` on its device (the host itself on a CPU), and `host_bytes` beside the device.

    Raises:
        InputError: there is no such model.
    """
    model, train, kl = config.model, config.train, config.algorithm.objective.kl
    components = _component_shapes(model.path)
    width = torch.finfo(DTYPES[model.dtype]).bits // 8
    numel = {name: sum(math.prod(s) for s in own.values()) for name, own in components.items()}
    frozen = sum(numel.values())
    away = 0
    for name, count in numel.items():
        resting = name.startswith("text_encoder") and model.text_encoders != "keep"
        if resting or (model.vae == "offload" and name == "vae"):
            frozen -= count
            away += count if not resting or model.text_encoders == "offload" else 0
    whole = {name: own for name, own in components.items() if name.startswith(TRAINED)}
    copies = 2 + (train.ema is not None)  # the weight, its gradient, the average
    if model.lora is None:
        trained = sum(numel[name] for name in whole)
        frozen -= trained  # trained in float32 instead
        copies += kl.beta > 0
    else:
        copies += kl.beta > 0 and kl.reference == "moving"
        tensors = {f"{name}.{key}": shape for name, own in whole.items() for key, shape in own.items()}
        trained = adapter_size(tensors, model.lora)
    moments = OPTIMIZERS[train.optimizer.name].bytes_per_number
    loading_peak = sum(numel.values()) * width  # all components are put on the device before any rests
    spared = sum(quantise.size(own, width, None) - quantise.size(own, width, model.quantise) for own in whole.values())
    return {
        "gpu_bytes": max(loading_peak, frozen * width + round(trained * (4 * copies + moments))) - spared,
        "host_bytes": away * width,
    }


def check(config: Config, device: torch.device) -> None:
    """Refuse a run that cannot fit, before its weights are loaded.

    Raises:
        InputError: the estimate is more than the device, or this machine, has.
    """
    switch = "model.dtype=bfloat16, model.text_encoders=free or model.quantise=int8"
    refuse_too_large(config.model.path, memory_estimate(config), device, switch)


def _component_shapes(path: str) -> dict[str, dict[str, Shape]]:
    """Shapes of all tensors, by component, as the headers of a model's safetensors say."""
    components = [name for name, kind in loading.index_of(path).items() if isinstance(kind, (list, tuple)) and kind[0]]
    source = embedded.place_of(path)
    with hub.one_sentence(path):
        by_component = {name: shapes(source, name) for name in components}
    return {name: own for name, own in by_component.items() if own}
