"""Pipelines built from configs alone, with their networks on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from diffusers import ConfigMixin, DiffusionPipeline

from flowgrpo.data import known
from flowgrpo.data.embedded import place_of
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.training.model_files.hub_files import one_sentence
from flowgrpo.training.planning import meta_networks

FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # configs and tokenizers


@contextmanager
def configs(path: str) -> Iterator[str]:
    """Return a context with a local folder of the model's configs, from `data.known` if the hub gives none.

    Raise InputError if there is no such model, and `data.known` does not have it either.
    """
    if Path(place_of(path)).is_dir():
        yield place_of(path)
    elif load.uses_known_configs(path):
        with known.folder(path) as place:
            yield place
    else:
        with one_sentence(path):
            place = huggingface_hub.snapshot_download(path, allow_patterns=FILES)
        yield place


def pipeline(folder: str, dtype: torch.dtype) -> DiffusionPipeline:
    """Build the stock pipeline of a local folder from its configs, in `dtype` except for modules kept in float32."""
    index = load.index_of(folder)
    components: dict[str, Any] = {}
    for name, written in index.items():
        kind = load.component_class(written)
        if kind is not None:
            components[name] = _component(kind, Path(folder) / name, dtype)
        elif not name.startswith("_"):  # an absent component, or a plain value
            components[name] = None if written == [None, None] else written
    return load.pipeline_class(folder)(**components)


def network(kind: type[Any], folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Build a network on the meta device from the config in its folder."""
    if issubclass(kind, ConfigMixin):
        return meta_networks.build_on_meta(lambda: kind.from_config(kind.load_config(folder)), dtype)
    return meta_networks.build_on_meta(lambda: kind(kind.config_class.from_pretrained(folder)), dtype)


def _component(kind: type[Any], folder: Path, dtype: torch.dtype) -> Any:
    if issubclass(kind, torch.nn.Module):
        return network(kind, folder, dtype)
    return kind.from_config(kind.load_config(folder)) if issubclass(kind, ConfigMixin) else kind.from_pretrained(folder)
