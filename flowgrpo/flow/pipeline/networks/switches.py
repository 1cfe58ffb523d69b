"""Switches of a pipeline for memory and speed; none of them changes the meaning of a log-probability.

Caches of activations and quantised attention would change it; `attention` refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch.utils.checkpoint import checkpoint

from flowgrpo.errors import InputError

DECODERS = ("vae", "audio_vae", "vocoder")
ENTRANCES = ("encode", "_encode", "decode", "forward")  # the methods of a decoder that pipelines call


def checkpoint_gradients(modules: Iterable[ModelMixin]) -> None:
    """Recompute blocks from their inputs in the backward pass, to the same values; raise InputError if unsupported."""
    for module in modules:
        if not getattr(module, "_supports_gradient_checkpointing", False):
            raise InputError(
                f"model.gradient_checkpointing: {type(module).__name__} does not support it, set it to false"
            )
        # Networks draw no random numbers, whose state cannot be asked for while a call is captured.
        module.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False, preserve_rng_state=False))


def tile(pipe: DiffusionPipeline) -> None:
    """Decode in overlapping tiles, which bounds the memory for large pictures; raise InputError if no decoder can.

    The seams change the decoded picture slightly, and so perhaps a reward; latents and log-probabilities do not change. A
    pipeline that encodes a picture as its condition encodes it in tiles too, in rollout and update alike.
    """
    modules = decoders(pipe).values()
    tiling: list[Any] = [
        module for module in modules if hasattr(module, "enable_tiling") and hasattr(module, "use_tiling")
    ]
    if not tiling:
        names = ", ".join(type(module).__name__ for module in modules) or "a pipeline without a VAE"
        raise InputError(f"model.vae_tiling: {names} has no tiling, leave it out")
    for module in tiling:
        module.enable_tiling()


def offload(module: torch.nn.Module, device: torch.device) -> None:
    """Keep a decoder in host memory, and on `device` only while it is used; its config and dtype stay readable."""

    def visiting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            away = next(module.parameters()).device != device
            try:
                if away:  # False inside another method of the decoder
                    module.to(device)
                return method(*args, **kwargs)
            finally:
                if away:
                    module.to("cpu")

        return run

    for name in ENTRANCES:
        if hasattr(module, name):
            setattr(module, name, visiting(getattr(module, name)))
    module.to("cpu")


def remember_device(pipe: DiffusionPipeline) -> None:
    """Let a pipeline cache its device until a component is replaced or moved, by making its class a subclass.

    Without it diffusers inspects every module in each call, that is, in each step of a policy.
    """
    kind, names = type(pipe), list(pipe.components)
    if getattr(kind, "remembers_device", False):
        return
    known: dict[str, Any] = {}

    def device(self: DiffusionPipeline) -> torch.device:
        places = tuple(_place(getattr(self, name, None)) for name in names)
        if known.get("places") != places:
            known.update(places=places, device=kind._execution_device.fget(self))
        return known["device"]

    copied = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    pipe.__class__ = type(
        kind.__name__, (kind,), {**copied, "_execution_device": property(device), "remembers_device": True}
    )


def _place(component: Any) -> tuple[Any, ...]:
    """Return a value that changes whenever a component is replaced or moved, or gets a hook that moves it."""
    identity: list[Any] = [id(component)]
    for part in component.modules() if isinstance(component, torch.nn.Module) else ():
        identity += [id(vars(part).get(name)) for name in ("_hf_hook", "_diffusers_hook")]
        weights = [p.device for p in part._parameters.values() if p is not None]
        if weights:
            return (*identity, weights[0])
    return tuple(identity)


def decoders(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """Return the decoders among a pipeline's components, by name."""
    return {n: m for n, m in pipe.components.items() if n in DECODERS and isinstance(m, torch.nn.Module)}
