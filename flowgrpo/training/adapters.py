"""LoRA adapters that a run starts from, as tensors: into a network, and into a file that the run keeps."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save_file

from flowgrpo.errors import InputError
from flowgrpo.schema.lazy import lazy
from flowgrpo.schema.sections import Lora

if TYPE_CHECKING:  # what reads a file does without
    import peft
    from peft import LoraConfig
else:
    peft = lazy("peft")

METADATA = "lora_adapter_metadata"  # diffusers' key in a file's header: peft's options, under the name of a network
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The adapter of one layer: alpha / rank times up x down is added to its weight.

    Attributes:
        down: (rank, in); of a convolution (rank, in, height, width).
        up: (out, rank), or (out, rank, 1, 1).
        bias: (out,) that is added to `up`'s output, or None.
        alpha: by which the output is scaled, over the rank.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None
    alpha: float

    @property
    def rank(self) -> int:
        """The rank."""
        return len(self.down)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors under peft's names."""
        yield from (("lora_A.weight", self.down), ("lora_B.weight", self.up))
        if self.bias is not None:
            yield "lora_B.bias", self.bias


@dataclass(frozen=True)
class Adapter:
    """The adapters of one network, by the paths of its layers; with `rslora`, alpha is over the root of the rank."""

    layers: Mapping[str, Matrices]
    rslora: bool = False

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(tensor.numel() for layer in self.layers.values() for _, tensor in layer.named())

    def config(self) -> LoraConfig:
        """As peft's: the commonest rank and alpha, and patterns for the other layers'."""
        rank, ranks = _commonest({path: layer.rank for path, layer in self.layers.items()})
        alpha, alphas = _commonest({path: layer.alpha for path, layer in self.layers.items()})
        return peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            rank_pattern=ranks,
            alpha_pattern=alphas,
            target_modules=list(self.layers),
            use_rslora=self.rslora,
            lora_bias=any(layer.bias is not None for layer in self.layers.values()),
        )

    def inject(self, network: torch.nn.Module) -> LoraConfig:
        """Put the adapters into a network, in float32; return their configuration."""
        config = self.config()
        ends = tuple(f".{path}" for path in self.layers)
        if any(path not in self.layers and path.endswith(ends) for path, _ in network.named_modules()):
            config.target_modules = "|".join(map(re.escape, self.layers))  # peft takes listed paths for ends of others
        tensors = {f"{path}.{name}": tensor for path, layer in self.layers.items() for name, tensor in layer.named()}
        peft.inject_adapter_in_model(config, network, state_dict=tensors)
        for path, layer in self.layers.items():
            injected = network.get_submodule(path)
            for name, tensor in layer.named():
                matrix, _, kind = name.partition(".")
                p = getattr(getattr(injected, matrix)["default"], kind)
                p.data = tensor.to(p.device, torch.float32, copy=True)  # layers may share a tensor of the file
        return config


def _commonest(values: Mapping[str, Number]) -> tuple[Number, dict[str, Number]]:
    """The value that most layers have, and patterns of the others' paths with theirs."""
    ((common, _),) = Counter(values.values()).most_common(1)
    return common, {f"^{re.escape(path)}": value for path, value in values.items() if value != common}


def alpha_in(options: Mapping[str, Any], path: str, rank: int) -> float:
    """The alpha of a layer by peft's options; without any its rank, as diffusers takes it.

    Raises:
        ValueError: the options hold something else than peft writes.
    """
    alpha = _matching(options.get("alpha_pattern") or {}, path)
    return _number(options.get("lora_alpha", rank) if alpha is None else alpha)


def _matching(patterns: Mapping[str, Number], path: str) -> Number | None:
    """The value of the first of peft's patterns that a layer's path matches."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path)), None)


def renamed(config: LoraConfig, names: Mapping[str, str]) -> LoraConfig:
    """The same configuration for layers that have other paths: from each path to its new one."""
    config = copy(config)
    config.target_modules = sorted(names.values())
    for key in ("rank_pattern", "alpha_pattern"):
        values = {new: _matching(getattr(config, key), old) for old, new in names.items()}
        setattr(config, key, {f"^{re.escape(new)}": value for new, value in values.items() if value is not None})
    return config


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"lora_alpha is {value!r}")
    return value


def check_agrees(lora: Lora, adapters: Iterable[Adapter]) -> None:
    """Refuse a rank, an alpha or targets that are written in a config and are not those of `model.lora.path`.

    Raises:
        InputError: one sentence that names both.
    """
    layers = {path: layer for adapter in adapters for path, layer in adapter.layers.items()}
    for key, asked in (("rank", lora.rank), ("alpha", lora.alpha)):
        for path, layer in layers.items():
            has = getattr(layer, key)
            if asked is not None and has != asked:
                raise InputError(
                    f"model.lora.{key}: {asked:g} is asked for, and model.lora.path has {has:g} at {path}; leave "
                    f"model.lora.{key} out, or set it to null"
                )
    if lora.targets is None:
        return
    if isinstance(lora.targets, str):
        raise InputError(
            f"model.lora.targets: {lora.targets} chooses layers, and model.lora.path has chosen its {len(layers)}, "
            f"{min(layers)} among them; leave model.lora.targets out, or set it to null"
        )
    named = {path: [target for target in lora.targets if f".{path}".endswith(f".{target}")] for path in layers}
    missing = [target for target in lora.targets if not any(target in found for found in named.values())]
    further = [path for path, found in named.items() if not found]
    if missing or further:
        but = f"model.lora.path has none of {missing[0]}" if missing else f"model.lora.path has {further[0]} too"
        raise InputError(
            f"model.lora.targets: {', '.join(lora.targets)} are asked for, and {but}; leave model.lora.targets out, or "
            "set it to null"
        )


def save(file: Path, networks: Mapping[str, torch.nn.Module], configs: Mapping[str, LoraConfig]) -> None:
    """Write the adapters of networks as diffusers names them, with their ranks and alphas in the header."""
    tensors, header = {}, {}
    for name, network in networks.items():
        for path, p in network.named_parameters():
            if p.requires_grad:
                tensors[f"{name}.{path.replace('.default.', '.')}"] = p.detach().cpu().contiguous()
        options = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias")
        header |= {f"{name}.{option}": getattr(configs[name], option) for option in options}
    partial = file.with_name(f".{file.name}.partial")
    save_file(tensors, partial, {"format": "pt", METADATA: json.dumps(header)})
    partial.replace(file)
