"""Traits: the few peculiarities of pipeline classes that cannot be found by running them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


TRAINED = ("transformer", "unet")  # prefixes of the components that compute the velocity
SHARING = "controlnet"  # prefix of components that may share layers with the trained ones
ENCODERS = "text_encoder"


@dataclass(frozen=True)
class Trait:
    """Peculiarities of one pipeline class.

    Attributes:
        why: the reason, shown by `flowgrpo models`.
        training_mode: classes of submodules that must stay in training mode to pass gradients on.
        loads_lora: whether the pipeline's own `load_lora_weights` works.
        undeclared: attributes that its networks read but do not define, with neutral values.
    """

    why: str
    training_mode: tuple[str, ...] = ()
    loads_lora: bool = True
    undeclared: dict[str, Any] = field(default_factory=dict)


TRAITS: dict[str, Trait] = {
    "HiDreamImagePipeline": Trait(
        "its mixture of experts runs under no_grad in evaluation mode", training_mode=("MOEFeedForwardSwiGLU",)
    ),
    "PRXPipeline": Trait("its load_lora_weights expects a U-Net, which it does not have", loads_lora=False),
    **dict.fromkeys(
        ("ZImageControlNetPipeline", "ZImageControlNetInpaintPipeline"),
        Trait("its control network reads a flag that it does not have", undeclared={"gradient_checkpointing": False}),
    ),
}


def apply(pipe: DiffusionPipeline) -> None:
    """Apply the trait of a pipeline's class, if any, to the pipeline, which is already in evaluation mode."""
    trait = TRAITS.get(type(pipe).__name__)
    if trait is None:
        return
    for component in pipe.components.values():
        if not isinstance(component, torch.nn.Module):
            continue
        for name, value in trait.undeclared.items():
            if not hasattr(component, name):
                setattr(component, name, value)
        for module in component.modules():
            if type(module).__name__ in trait.training_mode:
                module.train()


def loads_lora(pipe: DiffusionPipeline) -> bool:
    """Return whether `pipe.load_lora_weights` exists and works."""
    trait = TRAITS.get(type(pipe).__name__)
    return hasattr(pipe, "load_lora_weights") and (trait is None or trait.loads_lora)


def is_network(name: str) -> bool:
    """Return whether a component is one of a pipeline's large networks, which are not needed to encode prompts."""
    return name.startswith(TRAINED) or name.endswith("transformer")


def encodes_first(index: Mapping[str, Any]) -> bool:
    """Return, from a pipeline's index, whether its prompts can be encoded before its networks are loaded."""
    names = [name for name, kind in index.items() if isinstance(kind, (list, tuple)) and kind[0] is not None]
    encoders = any(name.startswith(ENCODERS) for name in names)
    return encoders and not any(name.startswith(SHARING) for name in names)


def networks(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """Return the networks of a pipeline that compute the velocity, by name."""
    components = pipe.components.items()
    return {name: m for name, m in components if name.startswith(TRAINED) and isinstance(m, torch.nn.Module)}
