"""The optimizers of `train.optimizer.name`: PyTorch's AdamW, and bitsandbytes' AdamW with 8-bit moments.

bitsandbytes keeps the moments of tensors with fewer than 4,096 numbers in float32.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.sections import Train

if TYPE_CHECKING:
    from flowgrpo.training.distributed import dtensors
else:
    dtensors = lazy("flowgrpo.training.distributed.dtensors")

MESSAGE = 2**28  # largest number of bytes in one all-reduce of gradients, which needs twice as much memory


@dataclass(frozen=True)
class Maker:
    """An optimizer class."""

    module: str
    name: str
    bytes_per_number: float  # bytes of both moments, with their scales, per trained number


OPTIMIZERS = {
    "adamw": Maker("torch.optim", "AdamW", 8),
    "adamw8bit": Maker("bitsandbytes.optim", "AdamW8bit", 2 * (1 + 4 / 256)),  # a float32 scale for each block
}


def check(name: str) -> None:
    """Raise InputError if an optimizer's library is not installed."""
    library = OPTIMIZERS[name].module.partition(".")[0]
    if find_spec(library) is None:
        raise InputError(
            f"train.optimizer.name: {name} needs the package {library}, pip install 'flowgrpo[8bit]', or take adamw"
        )


def check_compiler(what: str, device: torch.device, instead: str) -> None:
    """Raise InputError if PyTorch finds no compiler for a device; `what` and `instead` begin and end the message."""
    variable, default = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")  # inductor's, triton's
    compiler = os.environ.get(variable, default)
    if not shutil.which(compiler):
        raise InputError(
            f"{what}: PyTorch compiles for {device.type} with {compiler}, which is not installed here, install it, name "
            f"another compiler in {variable}, or {instead}"
        )


def build(train: Train, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer of a run for parameter groups; AdamW is fused if all parameters are on a GPU."""
    settings, maker = train.optimizer, OPTIMIZERS[train.optimizer.name]
    fused = train.optimizer.name == "adamw" and all(p.is_cuda for group in groups for p in group["params"])
    return getattr(importlib.import_module(maker.module), maker.name)(
        groups,
        lr=train.learning_rate,
        betas=tuple(settings.betas),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        **({"fused": True} if fused else {}),
    )


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return an optimizer's parameters in the order of its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def restore(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a `state_dict` into an optimizer. Unsharded moments are sharded like their parameters."""
    moments = {index: dict(values) for index, values in state["state"].items()}
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, p in zip(indices, parameters(optimizer), strict=False):  # `load_state_dict` raises for another length
        for key, value in moments.get(index, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                moments[index][key] = dtensors.shard_like(value, p)
    # Whether the step is fused depends on this machine, not on the machine that wrote the checkpoint.
    fused = [group["fused"] for group in optimizer.param_groups if "fused" in group]
    groups = [{**group, **({"fused": fused[0]} if fused else {})} for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "state": moments, "param_groups": groups})
