"""Switches of memory and speed, applied to a pipeline; none of them changes what a log-prob means.

What would change it (caches of activations, attention that quantises) is refused here.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import compile_regions_fsdp2
from diffusers import DiffusionPipeline
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND

from flowgrpo.config import Model, refuse_lossy_attention
from flowgrpo.errors import InputError

if TYPE_CHECKING:
    from flowgrpo.policy import DiffusersPolicy, Policy, Row

DECODERS = ("vae", "audio_vae", "vocoder")
ENTRANCES = ("encode", "_encode", "decode", "forward")  # of a decoder; pipelines call one of these

# What switches a guidance argument of diffusers' pipelines off; None leaves it out of the call.
OFF = {
    "true_cfg_scale": 1.0,
    "guidance_scale": 1.0,
    "guidance_scale_2": None,
    "audio_guidance_scale": 1.0,
    "img_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "pag_scale": 0.0,
    "negative_prompt": None,
}


def check(model: Model, device: torch.device) -> None:
    """Whether this machine can do what the switches ask for; called before the model is loaded.

    Raises:
        InputError: the attention backend or a compiler is missing here, or the backend is no good for training.
    """
    if model.attention is None:
        refuse_lossy_attention(DIFFUSERS_ATTN_BACKEND, "DIFFUSERS_ATTN_BACKEND")
    else:
        _try_attention(model.attention, model.dtype, device)
    if model.compile:
        variable, default = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")  # of inductor, and of triton
        if not shutil.which(os.environ.get(variable, default)):
            raise InputError(
                f"model.compile: PyTorch compiles for {device.type} with {os.environ.get(variable, default)}, which is not "
                f"installed here, install it, name another compiler in {variable}, or remove model.compile"
            )


def apply(model: Model, policy: DiffusersPolicy) -> None:
    """Set the switches of a config on a policy's pipeline, before its weights are unfrozen.

    Raises:
        InputError: a network of the pipeline does not have what a switch asks for.
    """
    modules = policy.modules.values()
    if model.gradient_checkpointing:
        checkpoint_gradients(modules)
    if model.attention is not None:
        set_attention(modules, model.attention)
    if model.vae_tiling:
        tile(policy.pipe)
    if model.vae == "offload":
        for module in _decoders(policy.pipe).values():
            offload(module, policy.pipe.device)
    if model.compile:
        compile_blocks(modules)


def refuse_inexact(pipe: DiffusionPipeline) -> None:
    """Let nothing pass whose output at a step depends on other steps, or that quantises its attention.

    Raises:
        InputError: a cache is enabled in a transformer, or a lossy attention backend is set.
    """
    for name, module in pipe.components.items():
        if not name.startswith(("transformer", "unet")) or not isinstance(module, torch.nn.Module):
            continue
        if getattr(module, "is_cache_enabled", False):
            raise InputError(
                f"model.path: {name} has a cache enabled ({type(module._cache_config).__name__}), which reuses activations "
                f"of other steps, so a replay would not score what was rolled out; call {name}.disable_cache() first"
            )
        for processor in _dispatching(module):
            if processor._attention_backend is not None:
                refuse_lossy_attention(AttentionBackendName(processor._attention_backend).value, name)


def checkpoint_gradients(modules: Iterable[torch.nn.Module]) -> None:
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


def set_attention(modules: Iterable[torch.nn.Module], name: str) -> None:
    """Compute the attention of modules with one of diffusers' backends, and no other module's.

    Raises:
        InputError: a module calls PyTorch's attention directly, past diffusers' choice (SD3 does).
    """
    for module in modules:
        if not _dispatching(module):
            raise InputError(
                f"model.attention: {type(module).__name__} has its attention fixed to PyTorch's own, remove model.attention"
            )
        with attention_backend(name):  # gives back the choice for the whole process, which the next line also sets
            module.set_attention_backend(name)


def tile(pipe: DiffusionPipeline) -> None:
    """Decode in overlapping tiles, which bounds the memory of large pictures and videos.

    The decoded picture changes slightly at the seams, and with it possibly a reward; latents and log-probs are computed
    before it and never change. (A pipeline that encodes a picture as its condition encodes it in tiles too, in the rollout
    and in the update alike.)

    Raises:
        InputError: no decoder of the pipeline has tiling.
    """
    decoders = _decoders(pipe).values()
    tiling = [module for module in decoders if hasattr(module, "enable_tiling") and hasattr(module, "use_tiling")]
    if not tiling:
        names = ", ".join(type(module).__name__ for module in decoders) or "a pipeline without a VAE"
        raise InputError(f"model.vae_tiling: {names} has no tiling, set it to false")
    for module in tiling:
        module.enable_tiling()


def offload(module: torch.nn.Module, device: torch.device) -> None:
    """Keep a decoder in host memory, and on `device` only while it encodes or decodes.

    Its config and dtype can be read as ever. Each visit costs the transfer of its weights, also that of a pipeline which
    encodes a picture at every step.
    """

    def visiting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            away = next(module.parameters()).device != device
            if away:  # and not inside another of its methods, or on a machine without a GPU
                module.to(device)
            try:
                return method(*args, **kwargs)
            finally:
                if away:
                    module.to("cpu")

        return run

    for name in ENTRANCES:
        if hasattr(module, name):
            setattr(module, name, visiting(getattr(module, name)))
    module.to("cpu")


def compile_blocks(modules: Iterable[torch.nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
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


def unguided(pipeline: type, embedded: bool = False) -> dict[str, Any]:
    """The call arguments that switch a pipeline's guidance off, None for one to be left out.

    Args:
        pipeline: the class.
        embedded: whether `guidance_scale` is an input of its transformer (guidance-distilled models); it stays as it is.
    """
    takes = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    off = {name: value for name, value in OFF.items() if name in takes}
    own = getattr(pipeline, "do_classifier_free_guidance", None)
    if embedded or ("true_cfg_scale" in takes and own is None):
        off.pop("guidance_scale", None)
    elif isinstance(own, property):
        try:
            if own.fget(SimpleNamespace(_guidance_scale=1.0, guidance_scale=1.0)):
                off["guidance_scale"] = 0.0  # pipelines that add guidance_scale * (cond - uncond) to cond
        except AttributeError:  # it reads more of the pipeline than its scale
            pass
    return off


def training_call(model: Model, policy: Policy) -> dict[str, Any]:
    """What goes over `model.call` while a run rolls out and updates: nothing, or whatever switches guidance off."""
    if model.guidance == "pipeline":
        return {}
    embedded = any(module.config.get("guidance_embeds") for module in policy.modules.values())
    return unguided(type(policy.pipe), embedded)


def check_unguided(policy: DiffusersPolicy, rows: Sequence[Row]) -> None:
    """Under the `training_call` of guidance `none`, see that a step really evaluates one branch.

    Raises:
        InputError: it evaluates more.
    """
    state, before = policy.start(rows[:1]), policy.evaluations
    with torch.no_grad():
        policy.velocity(state, policy.sigmas[0], rows[:1])
    branches, policy.evaluations = policy.evaluations - before, before
    if branches > 1:
        raise InputError(
            f"model.guidance: {type(policy.pipe).__name__} has no call argument that switches its guidance off (a step "
            f"still evaluates {branches} branches), set model.guidance=pipeline"
        )


def _decoders(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    return {n: m for n, m in pipe.components.items() if n in DECODERS and isinstance(m, torch.nn.Module)}


def _dispatching(module: torch.nn.Module) -> list[Any]:
    """The attention processors that let their backend be chosen."""
    processors = [getattr(m, "processor", None) for m in module.modules()]
    return [p for p in processors if hasattr(p, "_attention_backend")]


def _try_attention(name: str, dtype: str, device: torch.device) -> None:
    """One small attention with its gradient: whether package, device and dtype go together."""
    q, k, v = (torch.ones(1, 8, 2, 64, dtype=getattr(torch, dtype), device=device, requires_grad=True) for _ in "qkv")
    try:
        with torch.enable_grad(), attention_backend(name):
            dispatch_attention_fn(q, k, v).sum().backward()
    except Exception as error:  # kernels of other packages raise anything; what was raised is reported
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"model.attention: {name} cannot train in {dtype} on {device.type} here ({type(error).__name__}: {reason})"
        ) from error
