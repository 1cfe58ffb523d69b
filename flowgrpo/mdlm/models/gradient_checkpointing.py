"""Gradient checkpointing of language models."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from flowgrpo.errors import InputError


def can_checkpoint(model: torch.nn.Module) -> bool:
    """Return whether a model has layers that transformers marks for checkpointing."""
    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def checkpoint_gradients(model: torch.nn.Module) -> None:
    """Checkpoint a model in place: keep only the inputs of its layers, and compute the rest again in the backward pass.

    Gradients are the same. Wraps the layers that transformers marks for checkpointing; raises InputError if there are none.
    The switch of transformers is not used: it works in training mode only, with dropout on, and disables a decoder's cache.
    """
    if not can_checkpoint(model):
        raise InputError(f"model.gradient_checkpointing: {type(model).__name__} does not support it, set it to false")
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
