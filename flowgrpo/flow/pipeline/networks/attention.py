"""Checks and choice of the attention backend of networks."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.networks.attention_backends import refuse_lossy_attention
from rewards.compute import DTYPES


def refuse_inexact(pipe: DiffusionPipeline) -> None:
    """Raise InputError for a pipeline with a cache that makes steps depend on other steps, or with quantised attention."""
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


def set_attention(modules: Iterable[ModelMixin], name: str) -> None:
    """Set the modules' attention backend; raise InputError if one bypasses diffusers' dispatch, as SD3's does."""
    for module in modules:
        if not _dispatching(module):
            raise InputError(
                f"model.attention: {type(module).__name__} has its attention fixed to PyTorch's own, remove model.attention"
            )
        with attention_backend(name):  # restores the process-wide choice, which the next line sets
            module.set_attention_backend(name)


def _dispatching(module: torch.nn.Module) -> list[Any]:
    """Return the attention processors whose backend can be set."""
    processors = [getattr(m, "processor", None) for m in module.modules()]
    return [p for p in processors if hasattr(p, "_attention_backend")]


def try_attention(name: str, dtype: str, device: torch.device, *, learns: bool = True) -> None:
    """Run a small attention on a backend, with gradient if the model `learns`; raise InputError if it fails here."""
    if name == "xformers" and device.type == "cpu":
        raise InputError("model.attention: xformers computes on a GPU only, and there is none here; leave it out")
    if name == "xformers" and find_spec("xformers") is None:
        raise InputError("model.attention: xformers is not installed here: pip install 'flowgrpo[xformers]'")
    q, k, v = (torch.ones(1, 8, 2, 64, dtype=DTYPES[dtype], device=device, requires_grad=learns) for _ in "qkv")
    try:
        with torch.set_grad_enabled(learns), attention_backend(name):
            out = dispatch_attention_fn(q, k, v).sum()
            if learns:
                out.backward()
    except Exception as error:  # kernels of other packages raise anything
        reason, what = " ".join(str(error).split())[:300], "train" if learns else "compute"
        raise InputError(
            f"model.attention: {name} cannot {what} in {dtype} on {device.type} here ({type(error).__name__}: {reason})"
        ) from error
