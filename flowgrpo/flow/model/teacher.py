"""A teacher as the reference policy: a LoRA on the student's base, or a pipeline of the same architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import ModelMixin

from flowgrpo.data.embedded import place_of
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.model import initial_lora, memory_estimate
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.networks.traits import TRAINED
from flowgrpo.training.lora import lora_files
from flowgrpo.training.model_files.hub_files import one_sentence, variant_of
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.trained_weights import Weights

KEY = "model.teacher"


def check(config: Config) -> dict[str, Adapter]:
    """Return a LoRA teacher's adapters by network; {} for a pipeline teacher, or if no teacher is needed.

    Raise InputError if the teacher is missing, or does not fit this model.
    """
    model = config.model
    if config.algorithm.reference != "teacher":
        return {}
    if model.teacher is None:
        hinting = getattr(config.algorithm.hints, "source", None) == "teacher"
        asks = f"algorithm.{'hints.source' if hinting else 'objective.kl.reference'}=teacher"
        raise InputError(
            f"{KEY}: {asks} needs one; name a LoRA over {model.path}, a run's folder, or a pipeline like it"
        )
    with _naming_teacher(), lora_files.named(KEY):
        if load.is_pipeline(model.teacher):
            _check_pipeline(config, model.teacher)
            return {}
        if model.lora is None:
            load.index_of(model.teacher)  # raises, as it is no pipeline; a LoRA teacher needs a fixed base
        return initial_lora.read(model.teacher, initial_lora.outlines(model.path), model.path)


@contextmanager
def _naming_teacher() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("model.path:", f"{KEY}:")) from error


def _check_pipeline(config: Config, teacher: str) -> None:
    model = config.model
    if model.lora is not None and model.quantise is not None:
        raise InputError(
            f"{KEY}: a pipeline's weights replace the student's, but model.quantise={model.quantise} has changed "
            "those; set it to null, or name a LoRA"
        )
    if model.lora is not None and config.run.sharding != "none":
        raise InputError(
            f"{KEY}: a pipeline's weights replace the student's base, but that is in shards; set run.sharding=none, "
            "or name a LoRA"
        )
    load.check_weights(teacher, model.variant, TRAINED, or_plain=True)
    own, other = _describe_networks(model.path, model.variant), _describe_networks(teacher, model.variant)
    for name, here in own.items():
        if name not in other:
            raise InputError(f"{KEY}: {teacher} has no {name}, as {model.path} has")
        there = other[name]
        odd = next((key for key in here if key in there and here[key] != there[key]), None)
        if odd is not None:
            raise InputError(
                f"{KEY}: the {name} of {teacher} is not built as that of {model.path}: its {odd} is {there[odd]}, the "
                f"student's {here[odd]}"
            )


def _describe_networks(path: str, variant: str | None) -> dict[str, dict[str, Any]]:
    """Return for each network of a pipeline a dict of its class, config and weight shapes."""
    networks, shapes = {}, memory_estimate.component_shapes(path, TRAINED, variant)
    for name, named in load.index_of(path).items():
        kind: type[ModelMixin] | None = load.component_class(named) if name.startswith(TRAINED) else None
        if kind is not None:
            with one_sentence(path):
                config = kind.load_config(place_of(path), subfolder=name)
            written = {key: value for key, value in config.items() if not key.startswith("_")}
            networks[name] = {"class": kind.__name__, **written, **shapes.get(name, {})}
    return networks


def put_pipeline(weights: Weights, path: str, variant: str | None = None) -> None:
    """Make the networks of the pipeline at `path` the reference policy of `weights`.

    In the reference their weights replace the trained weights, or with LoRA the base, whose adapters are then off. They
    must have the student's shapes (see `check`), and the reference of `weights` must be a teacher.
    """
    values: dict[str, torch.Tensor] = {}
    kinds = load.index_of(path)
    for name, network in weights.modules.items():
        kind: type[ModelMixin] | None = load.component_class(kinds[name])
        assert kind is not None
        dtype = next(p.dtype for at, p in network.named_parameters() if ".lora_" not in at)
        with one_sentence(path, KEY):
            variant_here = variant_of(place_of(path), name, variant)
            loaded = kind.from_pretrained(place_of(path), subfolder=name, dtype=dtype, variant=variant_here)
        values |= {f"{name}.{at}": tensor for at, tensor in loaded.state_dict().items()}
    if weights.lora is None:
        weights.put_reference(values)
    else:
        weights.put_base(values)


def put(weights: Weights, teacher: Mapping[str, Adapter]) -> None:
    """Make a LoRA teacher the reference policy of `weights`.

    Its matrices are rescaled to the student's scaling and zero-padded to the student's rank, which is exact. Raise
    InputError if the student's adapters cannot hold one of its adapters.
    """
    values = {name: torch.zeros_like(p) for name, p in weights.named.items()}
    for network, adapter in teacher.items():
        if adapter.shifts:
            raise InputError(
                f"{KEY}: it shifts {network}.{min(adapter.shifts)}, which the student's adapters cannot do"
            )
        modules = dict(weights.modules[network].named_modules())
        for path, layer in adapter.layers.items():
            name, student = f"{network}.{path}", modules[path]
            down, up = f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight"
            if down not in values:
                raise InputError(
                    f"{KEY}: it has an adapter for {name}, where the student has none; add it to model.lora.targets"
                )
            if layer.bias is not None and f"{name}.lora_B.default.bias" not in values:
                raise InputError(f"{KEY}: its adapter of {name} has a bias, which the student's cannot have")
            if layer.rank > len(values[down]):
                raise InputError(
                    f"{KEY}: its adapter of {name} has rank {layer.rank}, the student's {len(values[down])}; take "
                    f"model.lora.rank={layer.rank}"
                )
            scale = layer.alpha / (layer.rank**0.5 if adapter.rslora else layer.rank)
            factor = scale / student.scaling["default"]
            values[down][: layer.rank] = layer.down.to(values[down])
            values[up][:, : layer.rank] = layer.up.to(values[up]) * factor
            if layer.bias is not None:
                bias = f"{name}.lora_B.default.bias"
                values[bias][:] = layer.bias.to(values[bias]) * factor
    weights.put_reference(values)
