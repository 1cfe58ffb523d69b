"""Networks without weights: in their place a pipeline encodes its prompts, before they are loaded.

What a pipeline reads of a network before its loop is its class, config, dtype and device, and these a hollow network has.
Its weights are on the meta device and cannot compute.
"""

from __future__ import annotations

import types
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


class _Hollow:
    """What goes before a network's own class: it says that it is where the pipeline computes, and cannot be moved."""

    pretended_device: torch.device

    @property
    def device(self) -> torch.device:
        """The device that the pipeline computes on."""
        return self.pretended_device

    def _apply(self, *_: Any, **__: Any) -> _Hollow:
        return self


def classes(index: Mapping[str, Any]) -> dict[str, type[diffusers.ModelMixin]]:
    """Return the classes of a pipeline's networks by name; none where one is not of diffusers, and all are loaded at once.

    Args:
        index: the pipeline's model_index.json.
    """
    found: dict[str, Any] = {}
    for name, kind in index.items():
        if is_network(name) and isinstance(kind, (list, tuple)) and kind[0] is not None:
            library = diffusers if kind[0] == "diffusers" else getattr(diffusers.pipelines, str(kind[0]), None)
            found[name] = getattr(library, str(kind[1]), None)
    if all(isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) for kind in found.values()):
        return found
    return {}


def networks(
    kinds: Mapping[str, type[diffusers.ModelMixin]], source: str, dtype: torch.dtype, device: torch.device
) -> dict[str, diffusers.ModelMixin]:
    """Return hollow networks by name, from their configs alone.

    Args:
        kinds: their classes by name; see `classes`.
        source: folder or hub id of the pipeline.
        dtype: of the weights that they stand for.
        device: that they say they are on.
    """
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
    network.pretended_device = torch.empty(0, device=device).device  # with its index

    def refuse(module: torch.nn.Module, *_: Any) -> None:
        raise InputError(
            f"model.text_encoders: {type(module).__name__} of {name} computes while the prompts are encoded, when {name} is "
            "not loaded yet; set it to keep"
        )

    for module in network.modules():
        module.register_forward_pre_hook(refuse)
    made = type(network)
    network.__class__ = types.new_class(made.__name__, (_Hollow, made), exec_body=lambda own: own.update(_names(made)))
    return network


def _names(made: type) -> dict[str, str]:
    return {"__module__": made.__module__, "__qualname__": made.__qualname__}


def fill(
    pipe: DiffusionPipeline,
    kinds: Mapping[str, type[diffusers.ModelMixin]],
    source: str,
    dtype: torch.dtype,
    *,
    variant: str | None = None,
) -> None:
    """Load the weights of a pipeline's hollow networks into host memory, and put the real networks in their place.

    Args:
        kinds, source: see `networks`.
        dtype: of the weights.
        variant: of their files, where they have such.
    """
    for name, kind in kinds.items():
        own = variant_of(source, name, variant)
        setattr(pipe, name, kind.from_pretrained(source, subfolder=name, dtype=dtype, variant=own))
    _construct_again(pipe)


def _construct_again(pipe: DiffusionPipeline) -> None:
    """Run a pipeline's constructor once more on what it has now: some set up their networks there."""
    written, scheduler = pipe._internal_dict, pipe.scheduler
    given = {**pipe.components, **pipe.parameters}
    for name in pipe.parameters:
        vars(pipe).pop(
            name, None
        )  # diffusers takes a tuple that is set a second time (Krea 2's layers) for a component
    pipe.__init__(**given)
    object.__setattr__(pipe, "scheduler", scheduler)  # some make one of their own
    pipe._internal_dict = written  # with the classes of text encoders that rest
