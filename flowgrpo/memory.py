"""Memory that a run needs at the least, from the sizes written in a model's files, without loading any weights.

Counted are weights, gradients, optimizer, average and reference. Activations come on top and depend on the model's code:
`flowgrpo doctor` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from safetensors import safe_open

from flowgrpo import loading
from flowgrpo.config import Config
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Lora
from flowgrpo.weights import ATTENTION, PROJECTIONS

Shape = tuple[int, ...]

TRAINED = ("transformer", "unet")
EMBEDDINGS = tuple(f"{name}.weight" for name in ("embed_tokens", "wte", "word_embeddings", "tok_embeddings"))


def estimate(config: Config) -> dict[str, int]:
    """Bytes a process needs: `gpu_bytes` on its device (the host itself on a CPU), and `host_bytes` beside the device.

    Raises:
        InputError: there is no such model.
    """
    model, train, kl = config.model, config.train, config.algorithm.objective.kl
    components = _component_shapes(model.path)
    width = torch.finfo(getattr(torch, model.dtype)).bits // 8
    numel = {name: sum(math.prod(s) for s in own.values()) for name, own in components.items()}
    frozen = sum(numel.values())
    away = 0
    for name, count in numel.items():
        resting = name.startswith("text_encoder") and model.text_encoders != "keep"
        if resting or (model.vae == "offload" and name == "vae"):
            frozen -= count
            away += count if not resting or model.text_encoders == "offload" else 0
    whole = {name: own for name, own in components.items() if name.startswith(TRAINED)}
    copies = 4 + (train.ema is not None)  # the weight, its gradient, two moments, the average
    if model.lora is None:
        trained = sum(numel[name] for name in whole)
        frozen -= trained  # trained in float32 instead
        copies += kl.beta > 0
    else:
        copies += kl.beta > 0 and kl.reference == "moving"
        tensors = {f"{name}.{key}": shape for name, own in whole.items() for key, shape in own.items()}
        trained = adapter_size(tensors, model.lora)
    loading_peak = sum(numel.values()) * width  # all components are put on the device before any rests
    return {
        "gpu_bytes": max(loading_peak, frozen * width + trained * 4 * copies),
        "host_bytes": away * width,
    }


def adapter_size(tensors: Mapping[str, Shape], lora: Lora) -> int:
    """How many numbers the adapters of a network have; with `all-linear`, small embeddings are counted as layers.

    Args:
        tensors: shapes of the network's, by name.
    """
    matrices = [(key, s) for key, s in tensors.items() if len(s) == 2]
    if lora.targets == "all-linear":  # a language model's head has the shape of its embedding
        embeddings = {shape for key, shape in matrices if key.endswith(EMBEDDINGS)}
        return sum(lora.rank * sum(s) for key, s in matrices if key.endswith(".weight") and s not in embeddings)
    targets = ATTENTION if lora.targets == "auto" else tuple(lora.targets)
    layers = [s for key, s in matrices if key.endswith(tuple(f"{t}.weight" for t in targets))]
    if not layers:  # `auto` on a model with other names takes all within attention
        within = ("attn", "attention", *PROJECTIONS)
        layers = [s for key, s in matrices if any(word in key for word in within)]
    return sum(lora.rank * sum(shape) for shape in layers)


def check(config: Config, device: torch.device) -> None:
    """Refuse a run that cannot fit, before its weights are loaded.

    Raises:
        InputError: the estimate is more than the device, or this machine, has.
    """
    switch = "model.dtype=bfloat16 or model.text_encoders=free"
    refuse_too_large(config.model.path, estimate(config), device, switch)


def refuse_too_large(path: str, need: Mapping[str, int], device: torch.device, switch: str) -> None:
    """Refuse a model that cannot fit.

    Args:
        need: `gpu_bytes` and `host_bytes`.
        switch: what to set other than a LoRA.

    Raises:
        InputError: it cannot.
    """
    on_gpu = device.type == "cuda"
    has = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    asked = need["gpu_bytes"] if on_gpu else need["gpu_bytes"] + need["host_bytes"]
    if asked > has:
        raise InputError(
            f"model.path: {path} needs at least {asked / 2**30:.1f} GiB for weights and optimizer, "
            f"{'this GPU' if on_gpu else 'this machine'} has {has / 2**30:.1f} GiB; train a LoRA (model.lora), or set "
            f"{switch}"
        )


def _component_shapes(path: str) -> dict[str, dict[str, Shape]]:
    """Shapes of all tensors, by component, as the headers of a model's safetensors say."""
    components = [name for name, kind in loading.index_of(path).items() if isinstance(kind, (list, tuple)) and kind[0]]
    place = loading.place_of(path)
    with loading.explained(path):
        found = {name: shapes(place, name) for name in components}
    return {name: own for name, own in found.items() if own}


def shapes(place: str, folder: str = "") -> dict[str, Shape]:
    """Shapes of all tensors, as the headers of the safetensors of a folder, or of a model's folder at the hub, say.

    Args:
        folder: below the place.
    """
    if not Path(place).is_dir() and HF_HUB_OFFLINE:
        place = snapshot_download(place, local_files_only=True)
    if Path(place).is_dir():
        found: dict[str, Shape] = {}
        for file in sorted((Path(place) / folder).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                found |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        return found
    api = HfApi()
    files = [file for file in api.list_repo_files(place) if file.endswith(".safetensors") and ".fp16." not in file]
    headers = [api.parse_safetensors_file_metadata(place, f) for f in files if f.rpartition("/")[0] == folder]
    return {key: tuple(tensor.shape) for header in headers for key, tensor in header.tensors.items()}
