"""LoRA files with the names that ComfyUI's loader reads; see `layer_names`.

ComfyUI adds `alpha / rank * up @ down` to a layer of its own model. Without `alpha` it takes 1 for `alpha / rank`, so every
layer's alpha is written. If ComfyUI fuses layers into one, their LoRAs become one block-diagonal LoRA of the summed rank. A
shift of a bias is named `diff_b`, a shift of any other parameter `diff`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.model.layer_names import NAMES, Names
from flowgrpo.flow.pipeline.loading.load import index_of
from flowgrpo.training.lora.lora_files import COMFYUI
from flowgrpo.training.weights.lora_adapters import shift_key
from flowgrpo.training.weights.trained_weights import AVERAGE, OTHER_POLICIES, Weights

DOWN, UP, BIAS = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias"  # peft's endings
State = Mapping[str, torch.Tensor]


def check(settings: Config, checkpoint: Path, shifts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise InputError for full weights, and for networks, layers, parameters or biases that have no place in ComfyUI.

    This loads no model. `shifts` has the shifts of each network of the run, by parameter path.
    """
    if settings.model.lora is None:
        raise InputError("--comfyui: this run trained full weights (model.lora: null); ComfyUI's names are for a LoRA")
    index = index_of(settings.model.path)
    with safe_open(checkpoint / "weights.safetensors", "pt") as file:
        keys = [key for key in file.keys() if not key.startswith((AVERAGE, *OTHER_POLICIES))]  # noqa: SIM118
        biases = {key.partition(".lora_")[0] for key in keys if key.endswith(".bias") and file.get_tensor(key).any()}
    outlines = initial_lora.outlines(settings.model.path) if biases else {}
    for network, _, layer in sorted(path.partition(".") for path in biases):
        if f"{layer}.bias" not in outlines[network].parameters:
            raise InputError(f"--comfyui: {layer} has no bias, so that ComfyUI would leave out the one of its adapter")
    biased = {key.partition(".")[0] for key in keys if key.endswith(".bias")}
    biased |= {network for network, paths in shifts.items() if any(path.endswith(".bias") for path in paths)}
    for path in sorted({key.partition(".lora_")[0] for key in keys if ".lora_A." in key}):
        network, _, layer = path.partition(".")
        _find_layer(names_of(index[network][1], network in biased), index[network][1], layer)
    for network, paths in shifts.items():
        for path in paths:
            _find_parameter(names_of(index[network][1], network in biased), index[network][1], path)


def names_of(kind: str, biased: bool = False) -> Names:
    """Return ComfyUI's names for a network class; with `biased`, those whose biases it reads; raise InputError if none."""
    if kind not in NAMES:
        known = ", ".join(sorted(name.removesuffix("Model") for name in NAMES))
        raise InputError(
            f"--comfyui: which names ComfyUI has for the layers of {kind} is not known, only of {known}; export without "
            "it, diffusers reads that"
        )
    names = NAMES[kind]
    return names.makers if biased and names.makers is not None else names


def _find_layer(names: Names, kind: str, layer: str) -> tuple[str, tuple[str, ...]]:
    match = names.find(layer)
    if match is None:
        raise InputError(
            f"--comfyui: the layer {layer} of {kind} has no name in ComfyUI that is known; train with "
            "model.lora.targets: auto, or export without it"
        )
    return match


def _find_parameter(names: Names, kind: str, path: str) -> str:
    match = names.find_parameter(path)
    if match is None:
        raise InputError(f"--comfyui: the parameter {path} of {kind} has no name in ComfyUI that is known")
    return match


def write(weights: Weights, out: Path, name: str) -> list[str]:
    """Write the current LoRA of each network in float32 to a folder in `out`; return the files relative to `out`.

    For the two networks of Wan 2.2, `-high_noise` and `-low_noise` are appended to the file's `name`.
    """
    (out / COMFYUI).mkdir()
    endings = [""] if len(weights.modules) == 1 else ["-high_noise", "-low_noise"]
    files = []
    for (module, network), ending in zip(weights.modules.items(), endings, strict=True):
        files.append(f"{COMFYUI}/{name}{ending}.safetensors")
        shifts = weights.begun[module].shifts if weights.begun else {}
        written = rename(network, weights.adapter_state(module), shifts)
        save_file(written, out / files[-1], {"format": "pt"})
    return files


def rename(network: torch.nn.Module, state: State, shifts: State | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter under ComfyUI's names, with an alpha for each layer.

    `state` has `LAYER.lora_A.weight` (rank, in), `LAYER.lora_B.weight` (out, rank) and `LAYER.lora_B.bias` (out,);
    `shifts` has the shifts of parameters by their paths.
    """
    kind, state = type(network).__name__, {key: tensor.detach().float().cpu() for key, tensor in state.items()}
    names = names_of(kind, any(path.endswith(".bias") for path in (*state, *(shifts or {}))))
    layers = [key.removesuffix(DOWN) for key in state if key.endswith(DOWN)]
    written = {}
    for name, parts in dict(_find_layer(names, kind, layer) for layer in layers).items():
        down, up, alpha, bias = names.keys(name)
        present = [part for part in parts if part in layers]
        scales = {part: _layer(network, part).scaling["default"] for part in present}  # alpha / rank
        written[down] = torch.cat([state[part + DOWN] for part in present]).contiguous()
        ups = [state[part + UP] * (scales[part] / scales[present[0]]) for part in present]
        written[up] = (
            ups[0].contiguous()
            if len(parts) == 1
            else _stack_parts(network, dict(zip(present, ups, strict=True)), parts)
        )
        written[alpha] = torch.tensor(float(scales[present[0]] * len(written[down])))
        if any(part + BIAS in state for part in present):
            biases = {part: state[part + BIAS] * scales[part] for part in present if part + BIAS in state}
            written[bias] = _stack_parts(network, biases, parts)
        for key in (up, bias) if names.swaps(name, (len(written[up]), written[down].shape[1])) else ():
            if key in written:
                written[key] = torch.cat(written[key].chunk(2)[::-1])
    prefix = "diffusion_model." if names.kohya else names.prefix  # kohya names layers only
    for path, shift in (shifts or {}).items():
        written[shift_key(prefix + _find_parameter(names, kind, path))] = shift.float().cpu().contiguous()
    return written


def _layer(network: torch.nn.Module, path: str) -> Any:
    return network.get_submodule(path)


def _stack_parts(network: torch.nn.Module, found: State, parts: Sequence[str]) -> torch.Tensor:
    """Join a fused layer's parts: matrices (rows, rank) block-diagonally, biases (rows,) in order; zeros if missing."""
    sizes = {part: _layer(network, part).out_features for part in parts}
    if next(iter(found.values())).ndim == 1:
        return torch.cat([found.get(part, torch.zeros(sizes[part])) for part in parts])
    return torch.block_diag(*(found.get(part, torch.zeros(sizes[part], 0)) for part in parts)).contiguous()
