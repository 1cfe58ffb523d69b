"""Weightless networks, with which a pipeline encodes its prompts before its real networks are loaded.

A weightless network has the class, config, dtype and device that a pipeline reads before its loop. Its weights are on the
meta device, so it cannot compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import accelerate
import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import no_init_weights

from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.networks.traits import is_network
from flowgrpo.training.model_files.hub_files import variant_of


class _Weightless:
    """A mixin for a network's class: the network reports the pipeline's device, and is never moved."""

    pretended_device: torch.device

    @property
    def device(self) -> torch.device:
        """Return the device that the pipeline computes on."""
        return self.pretended_device

    def _apply(self, *_: Any, **__: Any) -> _Weightless:
        return self


def classes(index: Mapping[str, Any]) -> dict[str, type[diffusers.ModelMixin]]:
    """Return the classes of the networks in a pipeline's index, by name; {} if one is no diffusers class."""
    kinds: dict[str, Any] = {}
    for name, kind in index.items():
        if is_network(name) and isinstance(kind, (list, tuple)) and kind[0] is not None:
            library = diffusers if kind[0] == "diffusers" else getattr(diffusers.pipelines, str(kind[0]), None)
            kinds[name] = getattr(library, str(kind[1]), None)
    if all(isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) for kind in kinds.values()):
        return kinds
    return {}


def networks(
    kinds: Mapping[str, type[diffusers.ModelMixin]], source: str, dtype: torch.dtype, device: torch.device
) -> dict[str, diffusers.ModelMixin]:
    """Build weightless networks of `kinds` (see `classes`) from configs in `source`; they report `dtype` and `device`."""
    return {name: _network(kind, source, name, dtype=dtype, device=device) for name, kind in kinds.items()}


def _network(
    kind: type[diffusers.ModelMixin], source: str, name: str, *, dtype: torch.dtype, device: torch.device
) -> diffusers.ModelMixin:
    written = kind.load_config(source, subfolder=name)
    with torch.random.fork_rng(devices=[]), no_init_weights(), accelerate.init_empty_weights():
        network = kind.from_config(written)
    in_float32 = network._keep_in_fp32_modules or ()
    for path, p in network.named_parameters():
        if p.is_floating_point():
            p.data = p.data.float() if any(part in path.split(".") for part in in_float32) else p.data.to(dtype)
    network.pretended_device = torch.empty(0, device=device).device  # device with its index

    def refuse(module: torch.nn.Module, *_: Any) -> None:
        raise InputError(
            f"model.text_encoders: {type(module).__name__} of {name} computes while the prompts are encoded, when {name} is "
            "not loaded yet; set it to keep"
        )

    for module in network.modules():
        module.register_forward_pre_hook(refuse)
    real = type(network)
    names = {"__module__": real.__module__, "__qualname__": real.__qualname__}
    network.__class__ = type(real.__name__, (_Weightless, real), names)
    return network


def fill(
    pipe: DiffusionPipeline,
    kinds: Mapping[str, type[diffusers.ModelMixin]],
    source: str,
    dtype: torch.dtype,
    *,
    variant: str | None = None,
) -> None:
    """Load the real networks into host memory, and put them into the pipeline in place of the weightless ones."""
    for name, kind in kinds.items():
        stored_as = variant_of(source, name, variant)
        setattr(pipe, name, kind.from_pretrained(source, subfolder=name, dtype=dtype, variant=stored_as))
    _construct_again(pipe)


def _construct_again(pipe: DiffusionPipeline) -> None:
    """Run a pipeline's constructor again on its components, since some constructors set up the networks."""
    written, scheduler = pipe._internal_dict, pipe.scheduler
    given = {**pipe.components, **pipe.parameters}
    for name in pipe.parameters:  # diffusers would mistake a tuple that is set again (Krea 2's layers) for a component
        vars(pipe).pop(name, None)
    pipe.__init__(**given)
    object.__setattr__(pipe, "scheduler", scheduler)  # some constructors build their own
    pipe._internal_dict = written  # the new one would not name the classes of offloaded text encoders
