"""Adapters that training starts from: `model.lora.path`, or `model.merge`, which is merged into the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import TextModel
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.lora import lora_files, lora_layers
from flowgrpo.training.lora.lora_files import KEY, LoraFile
from flowgrpo.training.lora.lora_layers import Index, Outline
from flowgrpo.training.weights.lora_adapters import Adapter, check_agrees

if TYPE_CHECKING:
    from flowgrpo.mdlm.models import architectures
else:
    architectures = lazy("flowgrpo.mdlm.models.architectures")

NETWORK = "model"  # name of the network in `Weights`


def read(model: TextModel) -> LoraFile | None:
    """Read and check the file of `model.lora.path` or `model.merge`; None without one.

    Raises InputError if there is no such file, it is no LoRA, or its rank, alpha or targets contradict the config.
    """
    path = model.merge if model.lora is None else model.lora.path
    if path is None:
        return None
    if not isinstance(path, str):
        raise InputError(f"{KEY}: a language model is one network, give one path in place of the map")
    file = lora_files.read(path)
    if model.lora is not None:
        check_agrees(model.lora, [Adapter(lora_layers.layers_of(file))])
    return file


def adapters(model: TextModel, file: LoraFile | None, network: torch.nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a file for a network; {} without a file.

    Layer names may also be those of a released model's own code. Raises InputError if they do not fit this network.
    """
    if file is None:
        return {}
    outline = Outline.of(network)
    names = [name.removeprefix("base_model.model.") for name in lora_layers.layers_of(file)]
    layers = lora_layers.names_in(NETWORK, outline.layers)
    released = {name: layers[path] for name, path in architectures.own_paths(network, names).items() if path in layers}
    parameters = lora_layers.names_in(NETWORK, outline.parameters)
    index = Index({NETWORK: layers | released}, {NETWORK: parameters})
    placed = lora_layers.assign_adapters(file, index, {NETWORK: outline}, model.path)
    if model.lora is not None:
        lora_layers.refuse_shifts_alone(placed.values())
    return placed
