"""A pipeline from its configs alone, with its networks on the device meta."""

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
    """A local folder with the configs of a built-in name, a local folder or a hub id, of which no weights are fetched.

    Where the hub does not give them, those that are known here stand in; see `data.known`.

    Raises:
        InputError: there is no such model, and it is not known here.
    """
    if Path(place_of(path)).is_dir():
        yield place_of(path)
    elif load.stands_in(path):
        with known.folder(path) as place:
            yield place
    else:
        with one_sentence(path):
            place = huggingface_hub.snapshot_download(path, allow_patterns=FILES)
        yield place


def pipeline(folder: str, dtype: torch.dtype) -> DiffusionPipeline:
    """The stock pipeline of a local folder, of which only the configs are read.

    Its networks are in `dtype`, but for what their classes keep in float32.

    Raises:
        InputError: the folder holds no diffusers pipeline.
    """
    index = load.index_of(folder)
    components: dict[str, Any] = {}
    for name, written in index.items():
        kind = load.component_class(written)
        if kind is not None:
            components[name] = _component(kind, Path(folder) / name, dtype)
        elif not name.startswith("_"):  # an absent component, or a number, such as the boundary between two experts
            components[name] = None if written == [None, None] else written
    return load.pipeline_class(folder)(**components)


def network(kind: type[Any], folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """A network from the config in its folder."""
    if issubclass(kind, ConfigMixin):
        return meta_networks.built(lambda: kind.from_config(kind.load_config(folder)), dtype)
    return meta_networks.built(lambda: kind(kind.config_class.from_pretrained(folder)), dtype)


def _component(kind: type[Any], folder: Path, dtype: torch.dtype) -> Any:
    if issubclass(kind, torch.nn.Module):
        return network(kind, folder, dtype)
    return kind.from_config(kind.load_config(folder)) if issubclass(kind, ConfigMixin) else kind.from_pretrained(folder)
