"""The optimizers of `train.optimizer.name`: PyTorch's AdamW, and bitsandbytes' with moments in 8 bits.

The latter keeps the moments of tensors of fewer than 4,096 numbers in float32.
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

MESSAGE = 2**28  # bytes of gradients that processes sum at once; what is made for it is twice as large


@dataclass(frozen=True)
class Maker:
    """Where an optimizer comes from.

    Attributes:
        module: that holds its class; the first part is the library.
        name: of the class.
        bytes_per_number: of both moments of a trained number, with their scales.
    """

    module: str
    name: str
    bytes_per_number: float


OPTIMIZERS = {
    "adamw": Maker("torch.optim", "AdamW", 8),
    "adamw8bit": Maker("bitsandbytes.optim", "AdamW8bit", 2 * (1 + 4 / 256)),  # a float32 scale for each block
}


def check(name: str) -> None:
    """Refuse an optimizer whose library is not installed.

    Raises:
        InputError: says how to install it.
    """
    library = OPTIMIZERS[name].module.partition(".")[0]
    if find_spec(library) is None:
        raise InputError(
            f"train.optimizer.name: {name} needs the package {library}, pip install 'flowgrpo[8bit]', or take adamw"
        )


def check_compiler(what: str, device: torch.device, instead: str) -> None:
    """Refuse what PyTorch cannot compile here.

    Args:
        what: the key that asks for it, and why.
        instead: what else can be done.

    Raises:
        InputError: there is no compiler.
    """
    variable, default = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")  # of inductor, and of triton
    compiler = os.environ.get(variable, default)
    if not shutil.which(compiler):
        raise InputError(
            f"{what}: PyTorch compiles for {device.type} with {compiler}, which is not installed here, install it, name "
            f"another compiler in {variable}, or {instead}"
        )


def build(train: Train, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of a run; AdamW whose parameters are all on a GPU takes its step in one kernel, without temporaries.

    Args:
        groups: of parameters; one may have a learning rate of its own.
    """
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
    """What an optimizer moves, in the order of their numbers in its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def restore(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put a `state_dict` in place, whole or in the shards of its parameters; of a whole each keeps its part."""
    moments = {index: dict(own) for index, own in state["state"].items()}
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, p in zip(
        indices, parameters(optimizer), strict=False
    ):  # another number of them is refused by the optimizer
        for key, value in moments.get(index, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                moments[index][key] = dtensors.placed_as(value, p)
    # How a step is taken is for the machine that takes it.
    fused = [group["fused"] for group in optimizer.param_groups if "fused" in group]
    groups = [{**group, **({"fused": fused[0]} if fused else {})} for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "state": moments, "param_groups": groups})
