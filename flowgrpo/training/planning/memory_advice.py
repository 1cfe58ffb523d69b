"""Which setting of a run saves memory in the phase where it ran out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.schema.sections import RunConfig
    from flowgrpo.training.weights import low_precision_copies, sharding
else:
    low_precision_copies = lazy("flowgrpo.training.weights.low_precision_copies")
    sharding = lazy("flowgrpo.training.weights.sharding")

# For each phase the switches that help there, by the keys of `_values`, in the order in which they help most runs. While
# prompts are encoded the networks are on no device yet; `checking` is all that doctor does with a loaded model.
SWITCHES = {
    "loading": ("dtype", "lora", "sharding", "quantise"),
    "encoding": ("dtype",),
    "trial": ("vae_tiling", "text_encoders", "sharding", "quantise", "vae", "dtype"),
    "probing": ("gradient_checkpointing", "text_encoders", "lora", "sharding", "quantise", "vae", "dtype"),
    "calibrating": ("rollout_batch", "text_encoders", "sharding", "quantise", "vae", "dtype"),
    "rollout": ("replay", "rollout_batch", "text_encoders", "draft", "sharding", "quantise", "vae", "dtype"),
    "decoding": ("replay", "vae_tiling", "rollout_batch", "text_encoders", "draft", "sharding", "quantise", "dtype"),
    "sampling": ("rollout_batch", "text_encoders", "quantise", "vae", "dtype"),
    "rewards": ("replay", "text_encoders", "sharding"),
    "update": (
        "replay",
        "gradient_checkpointing",
        "micro_batch",
        "text_encoders",
        "lora",
        "draft",
        "sharding",
        "quantise",
        "vae",
        "dtype",
    ),
    "evaluating": ("rollout_batch", "vae_tiling", "text_encoders", "sharding", "quantise", "dtype"),
    "checking": ("gradient_checkpointing", "micro_batch", "text_encoders", "lora", "quantise", "vae", "dtype"),
}


def advice(
    phase: str | None, settings: RunConfig, on_gpu: bool | None = None, *, prefixes: tuple[str, ...] = ("",)
) -> str | None:
    """The first override of a phase's order that is not set yet, as `train.micro_batch=4`; None if all are set.

    Args:
        phase: a key of `SWITCHES`; in another, nothing is known to help.
        on_gpu: whether the memory is a GPU's, which the host's can relieve; None: as on this machine.
        prefixes: of overrides to choose from; where none of them is left, from all.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    values = _values(settings, on_gpu)
    if phase == "update" and settings.model.lora is None:
        values["draft"] = None  # the copy of weights that learn is made for each draft
    left = [value for name in SWITCHES.get(phase or "", ()) if (value := values[name]) is not None]
    return next((value for value in left if value.startswith(prefixes)), left[0] if left else None)


def _values(settings: RunConfig, on_gpu: bool) -> dict[str, str | None]:
    """Each switch as an override that saves memory; None where it is set already, or the model has no such switch."""
    model, train = settings.model, settings.train

    def unless(key: str, value: str, already: tuple[object, ...]) -> str | None:
        known = key in type(model).model_fields
        return f"model.{key}={value}" if known and getattr(model, key) not in already else None

    drafts = low_precision_copies.of_drafts(settings)
    base_is_whole = model.lora is not None and model.quantise is None and not low_precision_copies.of_copies(settings)
    base_is_whole = base_is_whole and not settings.exchanges_base

    encoders = ("offload", ("offload", "free")) if on_gpu else ("free", ("free",))
    return {
        "dtype": unless("dtype", "bfloat16", ("bfloat16", "float16")),
        "lora": "model.lora={rank: 16}" if model.lora is None else None,
        "quantise": "model.quantise=int8" if base_is_whole else None,
        "replay": _replay(settings),
        "draft": None if drafts is None else f"{low_precision_copies.KEY}=null",
        "sharding": "run.sharding=fsdp2" if _can_share(settings) else None,
        "text_encoders": unless("text_encoders", *encoders),
        "vae": unless("vae", "offload", ("offload",)) if on_gpu else None,
        "vae_tiling": unless("vae_tiling", "true", (True,)),
        "gradient_checkpointing": unless("gradient_checkpointing", "true", (True,)),
        "micro_batch": _half("micro_batch", train.micro_batch),
        "rollout_batch": _half(
            "rollout_batch", train.micro_batch if train.rollout_batch is None else train.rollout_batch
        ),
    }


def _replay(settings: RunConfig) -> str | None:
    """Fewer graphs; None where none are kept."""
    if not settings.keeps_graphs:
        return None
    return "train.replay=auto" if settings.train.replay == "never" else "train.replay=always"


def _half(key: str, rows: int | str) -> str | None:
    """Half the rows of a call; None for one row, and where a run finds how many, which nobody knows then."""
    return f"train.{key}={rows // 2}" if isinstance(rows, int) and rows > 1 else None


def _can_share(settings: RunConfig) -> bool:
    """Whether each of some processes holds whole networks, and could hold a part."""
    return _processes(settings) > 1 and sharding.can(settings)


def _processes(settings: RunConfig) -> int:
    return int(os.environ.get("WORLD_SIZE", settings.run.processes))
