"""Memory that a run needs at the least, from the sizes written in a model's files, without loading any weights.

Counted are weights, gradients, optimizer, average and reference. Activations come on top and depend on the model's code:
`flowgrpo doctor` measures them.
"""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import torch
from huggingface_hub import HfApi
from safetensors import safe_open

from flowgrpo import loading
from flowgrpo.config import Config
from flowgrpo.errors import InputError
from flowgrpo.weights import ATTENTION

TRAINED = ("transformer", "unet")


def estimate(config: Config) -> dict[str, int]:
    """Bytes a process needs: `gpu_bytes` on its device (the host itself on a CPU), and `host_bytes` beside the device.

    Raises:
        InputError: there is no such model.
    """
    model, train, kl = config.model, config.train, config.algorithm.objective.kl
    shapes = _shapes(model.path)
    width = torch.finfo(getattr(torch, model.dtype)).bits // 8
    numel = {name: sum(math.prod(s) for s in own.values()) for name, own in shapes.items()}
    frozen = sum(numel.values())
    away = 0
    for name, count in numel.items():
        resting = name.startswith("text_encoder") and model.text_encoders != "keep"
        if resting or (model.vae == "offload" and name == "vae"):
            frozen -= count
            away += count if not resting or model.text_encoders == "offload" else 0
    whole = {name: own for name, own in shapes.items() if name.startswith(TRAINED)}
    copies = 4 + (train.ema is not None)  # the weight, its gradient, two moments, the average
    if model.lora is None:
        trained = sum(numel[name] for name in whole)
        frozen -= trained  # trained in float32 instead
        copies += kl.beta > 0
    else:
        copies += kl.beta > 0 and kl.reference == "moving"
        targets = ATTENTION if model.lora.targets == "auto" else tuple(model.lora.targets)
        matrices = [(key, s) for own in whole.values() for key, s in own.items() if len(s) == 2]
        layers = [s for key, s in matrices if key.endswith(tuple(f"{t}.weight" for t in targets))]
        if not layers:  # `auto` on a model with other names takes all within attention
            layers = [s for key, s in matrices if "attn" in key or "attention" in key]
        trained = sum(model.lora.rank * sum(shape) for shape in layers)
    loading_peak = sum(numel.values()) * width  # all components are put on the device before any rests
    return {
        "gpu_bytes": max(loading_peak, frozen * width + trained * 4 * copies),
        "host_bytes": away * width,
    }


def check(config: Config, device: torch.device) -> None:
    """Refuse a run that cannot fit, before its weights are loaded.

    Raises:
        InputError: the estimate is more than the device, or this machine, has.
    """
    need = estimate(config)
    on_gpu = device.type == "cuda"
    has = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    asked = need["gpu_bytes"] if on_gpu else need["gpu_bytes"] + need["host_bytes"]
    if asked > has:
        raise InputError(
            f"model.path: {config.model.path} needs at least {asked / 2**30:.1f} GiB for weights and optimizer, "
            f"{'this GPU' if on_gpu else 'this machine'} has {has / 2**30:.1f} GiB; train a LoRA (model.lora), or set "
            "model.dtype=bfloat16 or model.text_encoders=free"
        )


def _shapes(path: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of all tensors, by component, as the headers of a model's safetensors say."""
    components = [name for name, kind in loading.index_of(path).items() if isinstance(kind, (list, tuple)) and kind[0]]
    place = Path(loading.place_of(path))
    if not place.is_dir():
        return _remote_shapes(path, components)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in components:
        for file in sorted((place / name).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                own = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
            found.setdefault(name, {}).update(own)
    return found


def _remote_shapes(path: str, components: list[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    api, found = HfApi(), {}
    for file in api.list_repo_files(path):
        name = file.split("/")[0]
        if name in components and file.endswith(".safetensors") and ".fp16." not in file:
            header = api.parse_safetensors_file_metadata(path, file)
            own = {key: tuple(tensor.shape) for key, tensor in header.tensors.items()}
            found.setdefault(name, {}).update(own)
    return found
