"""Switches of memory and speed, applied to a pipeline; none of them changes what a log-prob means.

What would change it (caches of activations, attention that quantises) is refused here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import compile_regions_fsdp2
from diffusers import DiffusionPipeline, ModelMixin

from flowgrpo.errors import InputError

DECODERS = ("vae", "audio_vae", "vocoder")
ENTRANCES = ("encode", "_encode", "decode", "forward")  # of a decoder; pipelines call one of these


def checkpoint_gradients(modules: Iterable[ModelMixin]) -> None:
    """Keep only the inputs of blocks for the backward pass, and compute the rest again there: the same numbers.

    Raises:
        InputError: a module does not support it.
    """
    for module in modules:
        if not getattr(module, "_supports_gradient_checkpointing", False):
            raise InputError(
                f"model.gradient_checkpointing: {type(module).__name__} does not support it, set it to false"
            )
        module.enable_gradient_checkpointing()


def tile(pipe: DiffusionPipeline) -> None:
    """Decode in overlapping tiles, which bounds the memory of large pictures and videos.

    The decoded picture changes slightly at the seams, and with it possibly a reward; latents and log-probs are computed
    before it and never change. (A pipeline that encodes a picture as its condition encodes it in tiles too, in the rollout
    and in the update alike.)

    Raises:
        InputError: no decoder of the pipeline has tiling.
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
    """Keep a decoder in host memory, and on `device` only while it encodes or decodes.

    Its config and dtype can be read as ever. Each visit costs the transfer of its weights; a picture that a pipeline encodes
    is encoded once, see `pictures`.
    """

    def visiting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            away = next(module.parameters()).device != device
            try:
                if away:  # and not inside another of its methods, or on a machine without a GPU
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


def silence(pipe: DiffusionPipeline) -> None:
    """Have a pipeline show no progress, by one bar that says nothing instead of a new one at every call.

    Args:
        pipe: changed in place.
    """
    pipe.set_progress_bar_config(disable=True)
    shows, nothing = pipe.progress_bar, pipe.progress_bar(total=1)
    pipe.progress_bar = lambda iterable=None, total=None: nothing if iterable is None else shows(iterable)


def remember_components(pipe: DiffusionPipeline) -> None:
    """Have a pipeline keep the names of its components, and its device until a component is replaced or moved.

    Else diffusers asks each module of each component for hooks two times a call, and at the end of each reads the names off
    the signature of the pipeline's constructor; a policy calls its pipeline for every step.

    Args:
        pipe: changed in place: its class becomes one of the same name below its own.
    """
    kind = type(pipe)
    known: dict[str, Any] = {}
    if getattr(kind, "remembers_components", False):
        return
    names, keys = list(pipe.components), kind._get_signature_keys(pipe)

    def device(self: DiffusionPipeline) -> torch.device:
        places = tuple(_place(getattr(self, name, None)) for name in names)
        if known.get("places") != places:
            known.update(places=places, device=kind._execution_device.fget(self))
        return known["device"]

    def signature_keys(_: type, made: Any) -> tuple[list[str], list[str]]:
        return keys if type(made) is changed else kind._get_signature_keys(made)

    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own |= {"_execution_device": property(device), "_get_signature_keys": classmethod(signature_keys)}
    pipe.__class__ = changed = type(kind.__name__, (kind,), {**own, "remembers_components": True})


def _place(component: Any) -> tuple[Any, ...]:
    """Changes where a component is another, or its first weight is elsewhere, or is given a hook that moves it."""
    found: list[Any] = [id(component)]
    for part in component.modules() if isinstance(component, torch.nn.Module) else ():
        found += [id(vars(part).get(name)) for name in ("_hf_hook", "_diffusers_hook")]
        weights = [p.device for p in part._parameters.values() if p is not None]
        if weights:
            return (*found, weights[0])
    return tuple(found)


def compile_blocks(modules: Iterable[ModelMixin], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the repeated blocks of modules in place, so that they stay the objects which peft and diffusers know.

    The blocks compile at their first call. Rollout and update are compiled apart (one without gradient, one with), so the
    drift of a compiled model need not be exactly 0; on the tiny models of our tests it was, on a CPU.

    Args:
        backend: of `torch.compile`.
    """
    for module in modules:
        if getattr(module, "_repeated_blocks", None):
            module.compile_repeated_blocks(backend=backend)
        else:
            compile_regions_fsdp2(module, backend=backend)  # in place, unlike accelerate's compile_regions


def decoders(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """The components of a pipeline that decode, by name."""
    return {n: m for n, m in pipe.components.items() if n in DECODERS and isinstance(m, torch.nn.Module)}
