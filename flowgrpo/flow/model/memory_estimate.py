"""Memory that a run needs at the least, from the sizes written in a model's files, without loading any weights.

Counted are weights, gradients, optimizer, average, reference and the copy that drafts are sampled by. Activations come on
top and depend on the model's code: `flowgrpo doctor` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from flowgrpo.data import embedded
from flowgrpo.flow.config import Config
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.networks.traits import ENCODERS, TRAINED, is_network
from flowgrpo.schema.lora import Lora
from flowgrpo.training.model_files import hub_files
from flowgrpo.training.model_files.hub_files import Shape, refuse_too_large, shapes
from flowgrpo.training.weights import low_precision_copies, quantisation, sharding
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.optimizers import OPTIMIZERS
from flowgrpo.training.weights.trained_weights import adapter_size
from rewards.compute import DTYPES

Components = dict[str, dict[str, Shape]]


def memory_estimate(
    config: Config,
    components: Components | None = None,
    begun: Mapping[str, Adapter] | None = None,
    *,
    among: int = 1,
) -> dict[str, int]:
    """Bytes a process needs: `gpu_bytes` on its device (the host itself on a CPU), and `host_bytes` beside the device.

    Args:
        components: what `component_shapes` returned, if it was asked before.
        begun: what `initial_lora.adapters` returned, if it was asked before.
        among: how many processes share the networks, and what is learned where that is all of them.

    Raises:
        InputError: there is no such model.
    """
    model, train, reference = config.model, config.train, config.algorithm.reference
    components = component_shapes(model.path, variant=model.variant) if components is None else components
    width = torch.finfo(DTYPES[model.dtype]).bits // 8
    numel = {name: sum(math.prod(s) for s in own.values()) for name, own in components.items()}
    frozen = sum(numel.values())
    away = 0
    for name, count in numel.items():
        resting = name.startswith(ENCODERS) and model.text_encoders != "keep"
        if resting or (model.vae == "offload" and name == "vae"):
            frozen -= count
            away += count if not resting or model.text_encoders == "offload" else 0
    whole = {name: own for name, own in components.items() if name.startswith(TRAINED)}
    copies = 2 + (train.ema is not None) + (config.algorithm.old is not None)  # the weight, its gradient, and those
    copies += config.algorithm.snapshots
    if model.lora is None:
        trained = sum(numel[name] for name in whole)
        frozen -= trained  # trained in float32 instead
        copies += reference is not None
    else:
        begun = initial_lora.adapters(model) if begun is None else begun
        copies += reference == "moving" or (reference == "teacher" and not config.exchanges_base)
        copies += reference == "fixed" and bool(begun)
        frozen += sum(numel[name] for name in whole) * config.exchanges_base
        tensors = {f"{name}.{key}": shape for name, own in whole.items() for key, shape in own.items()}
        trained = sum(each.size for each in begun.values()) if begun else adapter_size(tensors, model.lora)
    moments = OPTIMIZERS[train.optimizer.name].bytes_per_number
    held = [quantisation.size(own, width, model.quantise) // (among if model.lora else 1) for own in whole.values()]
    spared = sum(quantisation.size(own, width, None) for own in whole.values()) - sum(held)
    learnt = frozen * width + round(trained * (4 * copies + moments)) // (1 if model.lora else among) - spared
    words, of_linear = low_precision_copies.of_copies(config), width if model.lora else 4
    copied = sum(low_precision_copies.size(own, of_linear, word) for own in whole.values() for word in words)
    return {
        "gpu_bytes": max(loading_peak(config, components), learnt + copied),
        "host_bytes": away * width,
    }


def loading_peak(config: Config, components: Components) -> int:
    """Bytes on the device until the prompts are encoded: of all components, or of all but the networks, which come later.

    Args:
        components: see `component_shapes`.
    """
    model = config.model
    width = torch.finfo(DTYPES[model.dtype]).bits // 8
    later = model.text_encoders != "keep" and load.loads_later(model.path)
    sizes = {
        name: quantisation.size(own, width, model.quantise if name.startswith(TRAINED) else None)
        for name, own in components.items()
    }
    return sum(size for name, size in sizes.items() if not (later and is_network(name)))


def check(config: Config, device: torch.device, begun: Mapping[str, Adapter] | None = None) -> None:
    """Refuse a run that cannot fit, before its weights are loaded.

    Args:
        begun: what `initial_lora.adapters` returned, if it was asked before.

    Raises:
        InputError: the estimate is more than the device, or this machine, has.
    """
    components = component_shapes(config.model.path, variant=config.model.variant)
    begun = initial_lora.adapters(config.model) if begun is None else begun

    def need(other: Config) -> dict[str, int]:
        return memory_estimate(other, components, begun, among=sharding.among(other.run.sharding))

    refuse_too_large(
        config.model.path, need(config), device, lambda: {key: need(other) for key, other in smaller(config)}
    )


def smaller(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield settings that may need less memory, as one writes them, and the config with each; some may be made already."""
    quantised = [("quantise", form) for form in quantisation.FORMS] if config.model.lora else [("lora", Lora())]
    if low_precision_copies.of_copies(config):  # which go with no quantised base
        quantised = [] if config.model.lora else quantised
    draft = config.train.draft
    if draft is not None and draft.precision is not None:
        train = config.train.model_copy(update={"draft": draft.model_copy(update={"precision": None})})
        yield f"{low_precision_copies.KEY}=null", config.model_copy(update={"train": train})
    finish = getattr(config.algorithm.tree, "finish", None)
    if finish is not None and finish.dtype is not None:
        tree = config.algorithm.tree.model_copy(update={"finish": finish.model_copy(update={"dtype": None})})
        algorithm = config.algorithm.model_copy(update={"tree": tree})
        yield f"{low_precision_copies.FINISH_KEY}=null", config.model_copy(update={"algorithm": algorithm})
    quantised = [] if config.exchanges_base else quantised
    encoders = [("text_encoders", word) for word in ("offload", "free")]
    for key, value in (*quantised, ("dtype", "bfloat16"), *encoders, ("vae", "offload")):
        model = config.model.model_copy(update={key: value})
        yield f"model.{key}={'{}' if key == 'lora' else value}", config.model_copy(update={"model": model})
    train = config.train.model_copy(update={"ema": None})
    if sharding.can(config):
        run = config.run.model_copy(update={"sharding": "fsdp2"})
        yield "run.sharding=fsdp2", config.model_copy(update={"run": run})
    yield "train.ema=null", config.model_copy(update={"train": train})


def component_shapes(path: str, beginning: str | tuple[str, ...] = "", variant: str | None = None) -> Components:
    """Shapes of all tensors, by component, as the heads of a model's files of weights say.

    Args:
        beginning: of the names of components.
        variant: of the files, where there are such.

    Raises:
        InputError: there is no such model.
    """
    components = [name for name in load.components_of(path) if name.startswith(beginning)]
    source = embedded.place_of(path)
    with hub_files.one_sentence(path):
        by_component = {name: shapes(source, name, variant) for name in components}
    return {name: own for name, own in by_component.items() if own}
