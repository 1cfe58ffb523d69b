"""The teacher of a distillation: a LoRA over the student's base, in the place of the reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowgrpo.errors import InputError
from flowgrpo.flow import start
from flowgrpo.flow.config import Config
from flowgrpo.training import lora_files
from flowgrpo.training.adapters import Adapter, Matrices
from flowgrpo.training.weights import Weights

KEY = "model.teacher"


def adapters(config: Config) -> dict[str, Adapter]:
    """The teacher's adapters, by network; {} where nobody asks for a teacher.

    Raises:
        InputError: there is none, or it is not for this model.
    """
    model = config.model
    if config.algorithm.reference != "teacher":
        return {}
    if model.teacher is None:
        raise InputError(
            f"{KEY}: algorithm.objective.kl.reference=teacher needs one; name a LoRA over {model.path}, or a run's folder"
        )
    if model.lora is None:
        raise InputError(
            f"{KEY}: it is a LoRA over the student's base, and model.lora=null trains that; take model.lora={{}}"
        )
    try:
        return start.placed(lora_files.read(model.teacher), start.layer_shapes(model.path), model.path)
    except InputError as error:  # that of a LoRA to start from
        raise InputError(str(error).replace(lora_files.KEY, KEY)) from error


def put(weights: Weights, teacher: Mapping[str, Adapter]) -> None:
    """Make a teacher the reference, exactly: its matrices, scaled as the student's are, and zeros up to the student's rank.

    Args:
        weights: with adapters, and a reference that is a teacher.

    Raises:
        InputError: it has an adapter that the student's cannot hold.
    """
    values = {name: torch.zeros_like(p) for name, p in weights.named.items()}
    for network, adapter in teacher.items():
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
            factor = _scale(layer, adapter.rslora) / student.scaling["default"]
            values[down][: layer.rank] = layer.down.to(values[down])
            values[up][:, : layer.rank] = layer.up.to(values[up]) * factor
            if layer.bias is not None:
                bias = f"{name}.lora_B.default.bias"
                values[bias][:] = layer.bias.to(values[bias]) * factor
    weights.put_reference(values)


def _scale(layer: Matrices, rslora: bool) -> float:
    return layer.alpha / (layer.rank**0.5 if rslora else layer.rank)
