"""What is said when memory runs out: in which phase, how much was asked for, and a switch that helps there."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from flowgrpo.schema.heavy import torch
from flowgrpo.schema.lazy import lazy

if TYPE_CHECKING:
    import psutil

    from flowgrpo.schema.sections import RunConfig
    from flowgrpo.training import low_precision, sharding
else:
    low_precision = lazy("flowgrpo.training.low_precision")
    psutil = lazy("psutil")
    sharding = lazy("flowgrpo.training.sharding")

ASKED = re.compile(r"[Tt]ried to allocate (?P<bytes>\d+) bytes|(?:[Tt]ried|Unable) to allocate (?P<words>[\d.]+ \w+)")
FREE = re.compile(r"total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free")

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
LAST_RESORT = "a larger GPU, or smaller samples (model.call, model.length)"
REWARDS_RESORT = "a lower batch_size in the options of the reward, or serve it on another machine (flowgrpo serve)"


class OutOfMemory(MemoryError):
    """Memory ran out; the message is one sentence.

    Args:
        phase: what was going on, a key of `SWITCHES` in a run; None if nobody knows.
        error: what was raised.
        place: where in the phase, as `the reward 'redness'`.

    Attributes:
        remedy: what to set or to take; None where nobody has said yet.
        sizes: of calls that a run had found and used, by key of `train`.
        kept_graphs: whether rollouts of the run kept graphs then.
    """

    def __init__(self, phase: str | None, error: BaseException, place: str | None = None):
        super().__init__(phase, error, place)
        self.phase, self.place, self.amounts = phase, place, _amounts(str(error))
        self.remedy: str | None = None
        self.sizes: dict[str, int] = {}
        self.kept_graphs = False

    def __str__(self) -> str:
        phase = f" in the {self.phase} phase" if self.phase else ""
        place = f", by {self.place}" if self.place else ""
        remedy = f"; what helps most is {self.remedy}" if self.remedy else ""
        return f"out of memory{phase}{place} ({self.amounts}){remedy}"


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


def last_resort(phase: str | None) -> str:
    """What is left to do in a phase where every switch is set."""
    return REWARDS_RESORT if phase == "rewards" else LAST_RESORT


def _values(settings: RunConfig, on_gpu: bool) -> dict[str, str | None]:
    """Each switch as an override that saves memory; None where it is set already, or the model has no such switch."""
    model, train = settings.model, settings.train

    def unless(key: str, value: str, already: tuple[object, ...]) -> str | None:
        known = key in type(model).model_fields
        return f"model.{key}={value}" if known and getattr(model, key) not in already else None

    drafts = low_precision.of_drafts(settings)
    base_is_whole = model.lora is not None and model.quantise is None and not low_precision.of_copies(settings)
    base_is_whole = base_is_whole and not settings.exchanges_base

    encoders = ("offload", ("offload", "free")) if on_gpu else ("free", ("free",))
    return {
        "dtype": unless("dtype", "bfloat16", ("bfloat16", "float16")),
        "lora": "model.lora={rank: 16}" if model.lora is None else None,
        "quantise": "model.quantise=int8" if base_is_whole else None,
        "replay": _replay(settings),
        "draft": None if drafts is None else f"{low_precision.KEY}=null",
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


def _amounts(said: str) -> str:
    """How much was asked for and how much is free: as the error says, or as this machine says now."""
    asked, free = ASKED.search(said), FREE.search(said)
    wanted = "" if asked is None else f"{asked['words'] or _gib(int(asked['bytes']))} asked for, "
    if free is not None:
        return f"{wanted}{free['free']} of the GPU's {free['total']} free"
    if "CUDA" in said or "CUBLAS" in said:
        return f"{wanted}on the GPU"
    memory = psutil.virtual_memory()
    return f"{wanted}{_gib(memory.available)} of this machine's {_gib(memory.total)} free"


def _gib(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"
