"""Pipelines with the shapes of real models and random weights, for benchmarks: nothing is downloaded.

Velocity networks and decoders have their released sizes. Text encoders, which run once per prompt, have one layer and a
small vocabulary, and tokenizers have no vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flowgrpo.data import known
from flowgrpo.flow.pipeline.loading import meta_pipeline
from flowgrpo.flow.pipeline.networks.traits import ENCODERS

SPREAD = 0.02  # standard deviation of a weight
SMALL = {"num_layers": 1, "num_hidden_layers": 1, "vocab_size": 1024}


@contextmanager
def folder(path: str, changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Iterator[Path]:
    """Yield a temporary folder with the configs of a known pipeline.

    Args:
        path: a hub id in `data/known_models.yaml`.
        changes: changes of configs, by component.
    """
    with known.folder(path) as place:
        for file in Path(place).glob("*/config.json"):
            written, name = json.loads(file.read_text()), file.parent.name
            if name.startswith(ENCODERS):
                written |= {key: value for key, value in SMALL.items() if key in written or key == "vocab_size"}
            file.write_text(json.dumps(written | dict(changes.get(name, {}))))
        yield Path(place)


def pipeline(place: Path, dtype: torch.dtype, device: torch.device) -> DiffusionPipeline:
    """Return the pipeline of a folder of configs, with weights from a normal distribution."""
    pipe = meta_pipeline.pipeline(str(place), dtype)
    generator = torch.Generator(device).manual_seed(0)
    for network in pipe.components.values():
        if isinstance(network, torch.nn.Module):
            _fill(network, generator)
    return pipe


def _fill(network: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw the weights of a network that are on the meta device, and move the network to the generator's device."""
    tied: dict[int, Any] = {}

    def materialise(x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            return x.to(generator.device)
        return torch.empty_like(x, device=generator.device).normal_(std=SPREAD, generator=generator)

    for module in network.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in tied:
                    tied[id(p)] = torch.nn.Parameter(materialise(p.data), requires_grad=False)
                module._parameters[name] = tied[id(p)]
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = materialise(b)
