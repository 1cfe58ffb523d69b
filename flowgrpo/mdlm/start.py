"""What a language model's training starts from: the adapters of `model.lora.path`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import TextModel
from flowgrpo.schema.lazy import lazy
from flowgrpo.training import lora_files
from flowgrpo.training.adapters import Adapter, check_agrees
from flowgrpo.training.lora_files import LoraFile

if TYPE_CHECKING:
    from flowgrpo.mdlm import architectures
else:
    architectures = lazy("flowgrpo.mdlm.architectures")

NETWORK = "model"  # its name in `Weights`


def read(model: TextModel) -> LoraFile | None:
    """The file of `model.lora.path`, checked as far as it alone tells; None without one.

    Raises:
        InputError: there is no such file, it is no LoRA, or not the one that the config names.
    """
    if model.lora is None or model.lora.path is None:
        return None
    if not isinstance(model.lora.path, str):
        raise InputError(f"{lora_files.KEY}: a language model is one network, give one path in place of the map")
    file = lora_files.read(model.lora.path)
    check_agrees(model.lora, [Adapter(lora_files.layers_of(file))])
    return file


def adapters(model: TextModel, file: LoraFile | None, network: torch.nn.Module) -> dict[str, Adapter]:
    """The adapters of a file for a network; {} without a file. Names may be those of a released model's own code.

    Raises:
        InputError: they are not for this model.
    """
    if file is None:
        return {}
    linear = {path: module for path, module in network.named_modules() if isinstance(module, torch.nn.Linear)}
    shapes = {path: (module.out_features, module.in_features) for path, module in linear.items()}
    layers = {path.removeprefix("base_model.model."): each for path, each in lora_files.layers_of(file).items()}
    own = architectures.own_paths(network, layers)
    layers = {own[path] if own[path] in shapes else path: each for path, each in layers.items()}
    return lora_files.placed(file, layers, {NETWORK: shapes}, model.path)
