"""LoRA adapters that a run starts from: injected into a network, merged into it, or saved to a file."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save_file

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.lora import Lora

if TYPE_CHECKING:  # reading a file does not need peft
    import peft
    from peft import LoraConfig
else:
    peft = lazy("peft")

METADATA = "lora_adapter_metadata"  # diffusers' header key for peft's options by network
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The adapter of one layer, which adds alpha / rank x up x down to the layer's weight."""

    down: torch.Tensor  # (rank, in); for a convolution (rank, in, height, width)
    up: torch.Tensor  # (out, rank); for a convolution (out, rank, 1, 1)
    bias: torch.Tensor | None
    alpha: float

    @property
    def rank(self) -> int:
        """The rank of both matrices."""
        return len(self.down)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield peft's name and the tensor of both matrices and of the bias, if there is one."""
        yield from (("lora_A.weight", self.down), ("lora_B.weight", self.up))
        if self.bias is not None:
            yield "lora_B.bias", self.bias


@dataclass(frozen=True)
class Adapter:
    """The LoRA of one network."""

    layers: Mapping[str, Matrices]  # by layer path
    rslora: bool = False  # whether alpha is divided by the square root of the rank
    shifts: Mapping[str, torch.Tensor] = field(default_factory=dict)  # changes of parameters, not trained, by path

    @property
    def size(self) -> int:
        """Number of trained weights."""
        return sum(tensor.numel() for layer in self.layers.values() for _, tensor in layer.named())

    def config(self) -> LoraConfig:
        """Return peft's config: the most common rank and alpha, and patterns for layers with another rank or alpha."""
        rank, ranks = _split_common({path: layer.rank for path, layer in self.layers.items()})
        alpha, alphas = _split_common({path: layer.alpha for path, layer in self.layers.items()})
        return peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # peft's type is int, but any number works
            rank_pattern=ranks,
            alpha_pattern=alphas,
            target_modules=list(self.layers),
            use_rslora=self.rslora,
            lora_bias=any(layer.bias is not None for layer in self.layers.values()),
        )

    def inject(self, network: torch.nn.Module) -> LoraConfig:
        """Inject float32 adapters into a network, add `shifts` to its parameters, and return peft's config.

        Raises InputError if a shifted weight is quantised.
        """
        config = self.config()
        for p, shift in zip(self.shifted(network), self.shifts.values(), strict=True):
            p.data = (p.float() + shift.to(p.device)).to(p.dtype)
        ends = tuple(f".{path}" for path in self.layers)
        if any(path not in self.layers and path.endswith(ends) for path, _ in network.named_modules()):
            config.target_modules = "|".join(map(re.escape, self.layers))  # peft matches the ends of paths in a list
        tensors = {f"{path}.{name}": tensor for path, layer in self.layers.items() for name, tensor in layer.named()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`lora_bias=True` was passed")  # removed below if a layer has none
            peft.inject_adapter_in_model(config, network, state_dict=tensors)
        for path, layer in self.layers.items():
            injected: Any = network.get_submodule(path)  # peft's layer
            for name, tensor in layer.named():
                matrix, _, kind = name.partition(".")
                p = getattr(getattr(injected, matrix)["default"], kind)
                p.data = tensor.to(p.device, torch.float32, copy=True)  # layers may share a tensor
            if injected.base_layer.bias is None and layer.bias is None:  # peft gives all layers a bias if one has it
                injected.lora_B["default"].bias = None
        return config

    def shifted(self, network: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters of a network that are shifted, in the order of `shifts`. Raises as `inject`."""
        parameters = dict(network.named_parameters())
        for path, shift in self.shifts.items():
            p = parameters.get(path)
            if p is None or not p.is_floating_point() or p.shape != shift.shape:
                raise InputError(f"model.quantise: model.lora.path shifts {path}, which is quantised; set it to null")
        return [parameters[path] for path in self.shifts]

    @torch.no_grad()
    def merge(self, network: torch.nn.Module) -> None:
        """Add the products of the matrices, the biases and the shifts to a network's parameters, which become float32.

        Raises InputError if two layers share a changed weight.
        """
        changes = dict(self.shifts)
        for path, layer in self.layers.items():
            scale = layer.alpha / (layer.rank**0.5 if self.rslora else layer.rank)
            product = layer.up.flatten(1).float() @ layer.down.flatten(1).float()
            changes[f"{path}.weight"] = scale * product + changes.get(f"{path}.weight", 0)
            if layer.bias is not None:
                changes[f"{path}.bias"] = scale * layer.bias
        names = defaultdict(list)
        for path, p in network.named_parameters(remove_duplicate=False):
            names[p].append(path)
        for path, change in changes.items():
            p = network.get_parameter(path)
            if others := [other for other in names[p] if other != path]:
                raise InputError(
                    f"model.merge: it adds to {path}, whose weight is that of {others[0]}, too; train it as a LoRA"
                )
            p.data = p.float() + change.to(p.device).reshape(p.shape)


def _split_common(values: Mapping[str, Number]) -> tuple[Number, dict[str, Number]]:
    """Return the most common value, and the other values by a pattern that matches their layer's path."""
    ((common, _),) = Counter(values.values()).most_common(1)
    return common, {f"^{re.escape(path)}": value for path, value in values.items() if value != common}


def alpha_in(options: Mapping[str, Any], path: str, rank: int) -> float:
    """Return a layer's alpha by peft's options, or else its rank, like diffusers. Raises ValueError for wrong options."""
    alpha = _match(options.get("alpha_pattern") or {}, path)
    alpha = options.get("lora_alpha", rank) if alpha is None else alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        raise ValueError(f"lora_alpha is {alpha!r}")
    return alpha


def _match(patterns: Mapping[str, Number], path: str) -> Number | None:
    """Return the value of the first of peft's patterns that matches a layer's path."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path)), None)


def rename_layers(config: LoraConfig, names: Mapping[str, str]) -> LoraConfig:
    """Return peft's config with renamed layers; `names` maps their old paths to new ones."""
    config = copy(config)
    config.target_modules = sorted(names.values())
    for key in ("rank_pattern", "alpha_pattern"):
        values = {new: _match(getattr(config, key), old) for old, new in names.items()}
        setattr(config, key, {f"^{re.escape(new)}": value for new, value in values.items() if value is not None})
    return config


def check_agrees(lora: Lora, adapters: Iterable[Adapter]) -> None:
    """Raise InputError if rank, alpha or targets of a config contradict the adapters of `model.lora.path`."""
    layers = {path: layer for adapter in adapters for path, layer in adapter.layers.items()}
    for key, asked in (("rank", lora.rank), ("alpha", lora.alpha)):
        for path, layer in layers.items():
            actual = getattr(layer, key)
            if asked is not None and actual != asked:
                raise InputError(
                    f"model.lora.{key}: {asked:g} is asked for, and model.lora.path has {actual:g} at {path}; leave "
                    f"model.lora.{key} out, or set it to null"
                )
    if lora.targets is None:
        return
    if isinstance(lora.targets, str):
        raise InputError(
            f"model.lora.targets: {lora.targets} chooses layers, and model.lora.path has chosen its {len(layers)}, "
            f"{min(layers)} among them; leave model.lora.targets out, or set it to null"
        )
    matches = {path: [target for target in lora.targets if f".{path}".endswith(f".{target}")] for path in layers}
    missing = [target for target in lora.targets if not any(target in found for found in matches.values())]
    further = [path for path, found in matches.items() if not found]
    if missing or further:
        but = f"model.lora.path has none of {missing[0]}" if missing else f"model.lora.path has {further[0]} too"
        raise InputError(
            f"model.lora.targets: {', '.join(lora.targets)} are asked for, and {but}; leave model.lora.targets out, or "
            "set it to null"
        )


def save(file: Path, adapters: Mapping[str, Adapter]) -> None:
    """Write the adapters of networks to a file with diffusers' tensor names, and ranks and alphas in its header."""
    tensors: dict[str, torch.Tensor] = {}
    header: dict[str, Any] = {}
    for name, adapter in adapters.items():
        for path, layer in adapter.layers.items():
            tensors |= {f"{name}.{path}.{key}": tensor for key, tensor in layer.named()}
        tensors |= {f"{name}.{shift_key(path)}": shift for path, shift in adapter.shifts.items()}
        config = adapter.config()
        for option in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias"):
            header[f"{name}.{option}"] = getattr(config, option)
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    partial = file.with_name(f".{file.name}.partial")
    save_file(tensors, partial, {"format": "pt", METADATA: json.dumps(header)})
    partial.replace(file)


def shift_key(path: str) -> str:
    """Return a shift's key in a file: `LAYER.diff` for a weight, `LAYER.diff_b` for a bias, else `PATH.diff`."""
    layer, _, kind = path.rpartition(".")
    return {"weight": f"{layer}.diff", "bias": f"{layer}.diff_b"}.get(kind, f"{path}.diff")
