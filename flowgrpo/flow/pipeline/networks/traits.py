"""Traits: what a few pipeline classes need and what cannot be found out by running them.

One row per class: what differs, and why. A class without a row, as nearly all are, is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


TRAINED = ("transformer", "unet")  # how the names of the components begin that compute the velocity
SHARING = "controlnet"  # how the names of the components begin that may take layers from these when a pipeline is made
ENCODERS = "text_encoder"


@dataclass(frozen=True)
class Trait:
    """What differs in one pipeline class.

    Attributes:
        why: the reason, for `flowgrpo models`.
        training_mode: submodules, by the name of their class, that must stay in training mode to pass gradients on.
        loads_lora: whether the pipeline's own `load_lora_weights` works.
        undeclared: attributes that its networks read and do not have, with the value that changes nothing.
    """

    why: str
    training_mode: tuple[str, ...] = ()
    loads_lora: bool = True
    undeclared: dict[str, Any] = field(default_factory=dict)


TRAITS: dict[str, Trait] = {
    "HiDreamImagePipeline": Trait(
        "its mixture of experts runs under no_grad in evaluation mode", training_mode=("MOEFeedForwardSwiGLU",)
    ),
    "PRXPipeline": Trait("its load_lora_weights is that of a U-Net, which it has not", loads_lora=False),
    **dict.fromkeys(
        ("ZImageControlNetPipeline", "ZImageControlNetInpaintPipeline"),
        Trait("its control network reads a flag that it does not have", undeclared={"gradient_checkpointing": False}),
    ),
}


def apply(pipe: DiffusionPipeline) -> None:
    """Set up a pipeline, already in evaluation mode, as its trait says."""
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
    """Whether `pipe.load_lora_weights` exists and works."""
    trait = TRAITS.get(type(pipe).__name__)
    return hasattr(pipe, "load_lora_weights") and (trait is None or trait.loads_lora)


def is_network(name: str) -> bool:
    """Whether a component is one of the large networks of a pipeline, trained or not; not needed to encode prompts."""
    return name.startswith(TRAINED) or name.endswith("transformer")


def encodes_first(index: Mapping[str, Any]) -> bool:
    """Whether the prompts of a pipeline can be encoded before its networks are loaded.

    Args:
        index: its model_index.json.
    """
    names = [name for name, kind in index.items() if isinstance(kind, (list, tuple)) and kind[0] is not None]
    encoders = any(name.startswith(ENCODERS) for name in names)
    return encoders and not any(name.startswith(SHARING) for name in names)


def networks(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """The networks of a pipeline that compute the velocity, by name."""
    components = pipe.components.items()
    return {name: m for name, m in components if name.startswith(TRAINED) and isinstance(m, torch.nn.Module)}
