"""The optimizers of `train.optimizer.name`: PyTorch's AdamW, and AdamW with moments in 8 or 4 bits by other libraries.

The small ones keep moments of tensors of fewer than 4,096 numbers in float32, as their libraries do. torchao's take the
learning rate as a tensor, for they compile their step, and keep moments in tensors of classes of their own.
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
from flowgrpo.schema.heavy import torch
from flowgrpo.schema.lazy import lazy
from flowgrpo.schema.sections import Train

if TYPE_CHECKING:
    from flowgrpo.training.distributed import dtensors
else:
    dtensors = lazy("flowgrpo.training.distributed.dtensors")

MESSAGE = 2**28  # bytes of gradients that processes sum at once; what is made for it is twice as large
EXTRA = "pip install 'flowgrpo[8bit]'"


@dataclass(frozen=True)
class Maker:
    """Where an optimizer comes from.

    Attributes:
        module: that holds its class; the first part is the library.
        name: of the class.
        bytes_per_number: of both moments of a trained number, with their scales.
        compiles: whether its step is compiled.
    """

    module: str
    name: str
    bytes_per_number: float
    compiles: bool = False


OPTIMIZERS = {
    "adamw": Maker("torch.optim", "AdamW", 8),
    "adamw8bit": Maker("bitsandbytes.optim", "AdamW8bit", 2 * (1 + 4 / 256)),  # a float32 scale for each block
    "adamw4bit": Maker("torchao.optim", "AdamW4bit", 2 * (1 / 2 + 4 / 128), compiles=True),
    "adamwfp8": Maker("torchao.optim", "AdamWFp8", 2 * (1 + 4 / 256), compiles=True),
}
# The classes of torchao's moments, by the modules that hold them; a checkpoint has their parts as ordinary tensors.
MOMENTS = {"OptimState4bit": "torchao.optim.subclass_4bit", "OptimStateFp8": "torchao.optim.subclass_fp8"}


def check(name: str, device: torch.device) -> None:
    """Refuse an optimizer that cannot run here.

    Raises:
        InputError: its library is not installed, or the compiler that its step needs.
    """
    maker = OPTIMIZERS[name]
    library = maker.module.partition(".")[0]
    if find_spec(library) is None:
        raise InputError(
            f"train.optimizer.name: {name} needs the package {library}, {EXTRA}, or take {_installed(without=library)}"
        )
    if maker.compiles:
        check_compiler(f"train.optimizer.name: {name} compiles its step", device, "take adamw8bit or adamw")


def _installed(without: str) -> str:
    """The words whose libraries are there, as a choice."""
    libraries = {word: maker.module.partition(".")[0] for word, maker in OPTIMIZERS.items()}
    return " or ".join(word for word, own in libraries.items() if own != without and find_spec(own) is not None)


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


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a group of parameters."""
    if isinstance(group["lr"], torch.Tensor):  # a compiled step would be compiled anew for each number
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """What an optimizer moves, in the order of their numbers in its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict`, of ordinary tensors and plain values alone: files of it need no library to be read."""
    state = optimizer.state_dict()
    moments = {
        index: {key: _parts(value) for key, value in own.items()} if isinstance(own, Mapping) else own
        for index, own in state["state"].items()
    }
    return {**state, "state": moments}


def restore(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put what `state_of` returned in place, whole or in the shards of its parameters; of a whole each keeps its part."""
    moments = {index: {key: _whole(value) for key, value in own.items()} for index, own in state["state"].items()}
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


def _parts(value: Any) -> Any:
    kind = type(value).__name__
    if kind not in MOMENTS:
        return value
    names, context = value.__tensor_flatten__()
    return {"moment": kind, "parts": {name: getattr(value, name) for name in names}, "context": context}


def _whole(value: Any) -> Any:
    if not isinstance(value, Mapping) or "moment" not in value:
        return value
    kind = value["moment"]
    moments = getattr(importlib.import_module(MOMENTS[kind]), kind)
    return moments.__tensor_unflatten__(value["parts"], value["context"], None, None)
