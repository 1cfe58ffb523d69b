"""Advice after an out-of-memory error: an option that saves memory in the phase of the error."""

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

# Options (keys of `_values`) that help in each phase; those that help most runs come first. During `encoding` the
# networks are not loaded yet. `checking` covers all work of the doctor on a loaded model.
SWITCHES = {
    "loading": "dtype lora sharding quantise",
    "encoding": "dtype",
    "trial": "vae_tiling text_encoders sharding quantise vae dtype",
    "probing": "gradient_checkpointing text_encoders lora sharding quantise vae dtype",
    "calibrating": "rollout_batch text_encoders sharding quantise vae dtype",
    "rollout": "replay rollout_batch text_encoders draft sharding quantise vae dtype",
    "decoding": "replay vae_tiling rollout_batch text_encoders draft sharding quantise dtype",
    "sampling": "rollout_batch text_encoders quantise vae dtype",
    "rewards": "replay text_encoders sharding",
    "update": "replay gradient_checkpointing micro_batch text_encoders lora draft sharding quantise vae dtype",
    "evaluating": "rollout_batch vae_tiling text_encoders sharding quantise dtype",
    "checking": "gradient_checkpointing micro_batch text_encoders lora quantise vae dtype",
}


def advice(
    phase: str | None, settings: RunConfig, on_gpu: bool | None = None, *, prefixes: tuple[str, ...] = ("",)
) -> str | None:
    """Return the first option for a phase that is not set yet, such as `train.micro_batch=4`; None if all are set.

    Args:
        phase: a key of `SWITCHES`. For None or any other phase the result is None.
        on_gpu: whether the GPU's memory ran out, not the host's. None means yes if this machine has a GPU.
        prefixes: options that begin with one of these are preferred.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    values = _values(settings, on_gpu)
    if phase == "update" and settings.model.lora is None:
        values["draft"] = None  # the copy of trained weights exists only while starts are drafted
    left = [value for name in SWITCHES.get(phase or "", "").split() if (value := values[name]) is not None]
    return next((value for value in left if value.startswith(prefixes)), left[0] if left else None)


def _values(settings: RunConfig, on_gpu: bool) -> dict[str, str | None]:
    """Return each option as an override, by name; None if it is set already or the model lacks it."""
    model, train = settings.model, settings.train

    def unless(key: str, value: str, already: tuple[object, ...]) -> str | None:
        known = key in type(model).model_fields
        return f"model.{key}={value}" if known and getattr(model, key) not in already else None

    drafts, copies = low_precision_copies.of_drafts(settings), low_precision_copies.of_copies(settings)
    base_is_whole = model.lora is not None and model.quantise is None and not copies and not settings.exchanges_base
    processes = int(os.environ.get("WORLD_SIZE", settings.run.processes))
    replay = None
    if settings.keeps_graphs:
        replay = "train.replay=auto" if train.replay == "never" else "train.replay=always"
    # Without a `rollout_batch`, `micro_batch` sets both sizes, so that rollout and update round alike.
    rollout = ("rollout_batch", train.rollout_batch) if train.rollout_batch else ("micro_batch", train.micro_batch)
    encoders = ("offload", ("offload", "free")) if on_gpu else ("free", ("free",))
    return {
        "dtype": unless("dtype", "bfloat16", ("bfloat16", "float16")),
        "lora": "model.lora={rank: 16}" if model.lora is None else None,
        "quantise": "model.quantise=int8" if base_is_whole else None,
        "replay": replay,
        "draft": None if drafts is None else f"{low_precision_copies.KEY}=null",
        "sharding": "run.sharding=fsdp2" if processes > 1 and sharding.can(settings) else None,
        "text_encoders": unless("text_encoders", *encoders),
        "vae": unless("vae", "offload", ("offload",)) if on_gpu else None,
        "vae_tiling": unless("vae_tiling", "true", (True,)),
        "gradient_checkpointing": unless("gradient_checkpointing", "true", (True,)),
        "micro_batch": _half("micro_batch", train.micro_batch),
        "rollout_batch": _half(*rollout),
    }


def _half(key: str, rows: int | str) -> str | None:
    """Return an override that halves the rows of a call; None for one row or for rows that the run probes."""
    return f"train.{key}={rows // 2}" if isinstance(rows, int) and rows > 1 else None
