"""Adapters of a language model in peft's format, for export and engines."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import torch
from safetensors.torch import save_file

from flowgrpo.mdlm.config import TextModel
from flowgrpo.mdlm.models.architectures import released_paths
from flowgrpo.training.weights.lora_adapters import rename_layers
from flowgrpo.training.weights.trained_weights import Weights


def write_adapter(model: TextModel, network: torch.nn.Module, weights: Weights, out: Path) -> None:
    """Write the adapter in peft's format, with the released code's layer names if each layer is a whole layer there."""
    assert weights.lora is not None
    lora, state = copy(weights.lora["model"]), weights.adapter_state("model")
    released = released_paths(network, layers(weights))
    if released:
        lora = rename_layers(lora, released)
        state = {released[_layer(key)] + key.removeprefix(_layer(key)): value for key, value in state.items()}
    lora.base_model_name_or_path, lora.inference_mode = model.path, True
    lora.save_pretrained(str(out))
    state = {f"base_model.model.{key}": value.float().cpu().contiguous() for key, value in state.items()}
    save_file(state, out / "adapter_model.safetensors", {"format": "pt"})


def layers(weights: Weights) -> set[str]:
    """Return the paths of the layers that have adapters."""
    return {_layer(key) for key in weights.adapter_state("model")}


def _layer(key: str) -> str:
    return key.partition(".lora_")[0]
