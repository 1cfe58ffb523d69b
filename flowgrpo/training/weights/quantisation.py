"""A frozen base in 8 or 4 bits a weight, under adapters that learn in float32.

Linear layers of a network's repeated blocks keep codes and scales, of which the weights are made again in every forward and
every backward pass, so that no graph keeps them. What stands before and after the blocks (embeddings, heads, the layers that
read the time) is small and stays as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from flowgrpo.errors import InputError
from flowgrpo.training.model_files.hub_files import Shape

Tensor = torch.Tensor
IN_BLOCK = re.compile(r"(?:^|\.)\d+\..+\.weight$")  # a block's name is a number

# The 16 values of NormalFloat4: quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, arXiv 2305.14314, appendix E).
NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Form(Protocol):
    """How the weights (out, in) of a layer are kept.

    Attributes:
        most: the largest code; the largest of the weights that share a scale has it.
        shared: how many neighbours in a row share a scale; None for the whole row.
        bits: of a code.
        table: what the codes stand for, if they are places in a table; else None.
    """

    most: float
    shared: int | None
    bits: int
    table: tuple[float, ...] | None

    def codes(self, normed: Tensor) -> Tensor:
        """The codes, a row for each output, of float32 weights (out, in) that were divided by their scales."""

    def values(self, codes: Tensor, dtype: torch.dtype, pairs: Tensor | None) -> Tensor:
        """What codes stand for, (out, in); `pairs` (256, 2) are the two values of each byte, where there is a table."""


class Int8:
    """Whole numbers from -127 to 127 and a scale for each row."""

    most, bits = 127.0, 8
    shared: int | None = None
    table: tuple[float, ...] | None = None

    def codes(self, normed: Tensor) -> Tensor:
        """See `Form`."""
        return normed.round().clamp(-self.most, self.most).to(torch.int8)

    def values(self, codes: Tensor, dtype: torch.dtype, pairs: Tensor | None) -> Tensor:
        """See `Form`."""
        return codes.to(dtype)


class NormalFloat4:
    """The nearest of the 16 values of NormalFloat4, two in a byte, and a scale for each 64 of a row."""

    most, bits = 1.0, 4
    shared: int | None = 64
    table: tuple[float, ...] | None = NORMAL_FLOAT

    def codes(self, normed: Tensor) -> Tensor:
        """See `Form`."""
        table = torch.tensor(self.table, device=normed.device)
        nearest = torch.bucketize(normed, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        return nearest[:, 0::2] << 4 | nearest[:, 1::2]

    def values(self, codes: Tensor, dtype: torch.dtype, pairs: Tensor | None) -> Tensor:
        """See `Form`."""
        assert pairs is not None
        return torch.nn.functional.embedding(codes.int(), pairs.to(dtype)).flatten(1)


FORMS: dict[str, Form] = {"int8": Int8(), "nf4": NormalFloat4()}


def _weight(form: Form, codes: Tensor, scale: Tensor, pairs: Tensor | None) -> Tensor:
    """The weights (out, in) that codes and scales stand for, in the dtype of the scales."""
    values = form.values(codes, scale.dtype, pairs)
    return (values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)


class _Product(torch.autograd.Function):
    """A linear layer of stored weights, with the gradient of its input alone."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, form: Form, *stored: Any) -> Tensor:  # codes, scale, pairs or None
        ctx.form = form
        ctx.save_for_backward(*stored)
        return torch.nn.functional.linear(x, _weight(form, *stored), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ _weight(ctx.form, *ctx.saved_tensors), *[None] * 5


class QuantisedLinear(torch.nn.Linear):
    """A frozen linear layer that keeps codes and scales instead of its weight, which is made of them when it is asked for.

    Attributes:
        codes: of the weights, a row for each output.
        scale: (out, scales of a row), in the dtype that the weight had.
    """

    pairs: Tensor | None

    def __init__(self, linear: torch.nn.Linear, form: str):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.form = linear.in_features, linear.out_features, FORMS[form]
        self.bias = linear.bias
        weight, most = linear.weight.detach(), self.form.most
        blocks = weight.float().unflatten(1, (-1, self.form.shared or linear.in_features))
        least = torch.finfo(weight.dtype).tiny
        scale = (
            (blocks.abs().amax(2) / most).clamp(min=least).to(weight.dtype)
        )  # the codes are of the scale as it is kept
        codes = self.form.codes((blocks / scale[..., None].float()).flatten(1))
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        table = (
            None if self.form.table is None else torch.tensor(self.form.table, dtype=scale.dtype, device=scale.device)
        )
        self.register_buffer("pairs", None if table is None else torch.cartesian_prod(table, table), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # torch has no linear layer without a parameter of it
        """The weights (out, in) that the layer computes with, made anew; writing into them changes nothing."""
        return _weight(self.form, self.codes, self.scale, self.pairs)

    def forward(self, x: Tensor) -> Tensor:
        """The product (..., out) with x (..., in)."""
        return _Product.apply(x, self.bias, self.form, self.codes, self.scale, self.pairs)


class HalfLinear(torch.nn.Linear):
    """A frozen linear layer that multiplies in bfloat16, whatever its input has, and returns what that has."""

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = torch.nn.Parameter(linear.weight.detach().to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product (..., out) with x (..., in)."""
        product = torch.nn.functional.linear(x.to(torch.bfloat16), self.weight).to(x.dtype)
        return product if self.bias is None else product + self.bias.to(x.dtype)


@torch.no_grad()
def quantise(module: torch.nn.Module, form: str) -> None:
    """Quantise the linear layers in the blocks of a network in place, with adapters on it or without; adapters stay.

    Args:
        form: `int8` or `nf4`.

    Raises:
        InputError: it has no such layers, is quantised already, or has a layer that cannot be.
    """
    for path, layer in layers_in_blocks(module, "model.quantise").items():
        check_layer(path, layer, form, "model.quantise")
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, QuantisedLinear(layer, form))


def layers_in_blocks(module: torch.nn.Module, key: str) -> dict[str, torch.nn.Linear]:
    """The linear layers in the blocks of a network by their paths, without adapters.

    Args:
        key: of the config that asks for them to be quantised.

    Raises:
        InputError: it has none, or is quantised already.
    """
    if getattr(module.config, "quantization_config", None) is not None:
        raise InputError(f"{key}: the model's weights are quantised already in its files, set it to null")
    layers = {path: m for path, m in module.named_modules() if type(m) is torch.nn.Linear and _quantised(path)}
    if not layers:
        raise InputError(f"{key}: {type(module).__name__} has no linear layers in repeated blocks, set it to null")
    return layers


def check_layer(path: str, layer: torch.nn.Linear, form: str, key: str) -> None:
    """Refuse a layer that cannot be quantised; arguments as of `layers_in_blocks`.

    Raises:
        InputError: its rows do not divide into blocks, or its weights are not finite.
    """
    shared = FORMS[form].shared
    if shared is not None and layer.in_features % shared:
        raise InputError(
            f"{key}: {form} takes blocks of {shared} weights, {path} has rows of {layer.in_features}; take int8"
        )
    if not layer.weight.is_meta and not layer.weight.isfinite().all():  # a plan has weights without numbers
        raise InputError(f"{key}: the weights of {path} are not finite")


def _quantised(path: str) -> bool:
    """Whether the linear layer of a path lies inside a repeated block and is no half of an adapter."""
    return IN_BLOCK.search(f"{path}.weight") is not None and ".lora_" not in path


def refuse_dynamic(module: torch.nn.Module) -> None:
    """Refuse a network whose files ask for activations that are quantised as they come.

    Raises:
        InputError: they do.
    """
    written = getattr(module.config, "quantization_config", None)
    if "DynamicActivation" in str(written):
        raise InputError(
            "model.path: its files quantise activations as they come, where gradients stop before they reach an adapter; "
            "take weights that are not quantised, or weights alone"
        )


def size(tensors: Mapping[str, Shape], width: int, form: str | None) -> int:
    """Bytes of a frozen network.

    Args:
        tensors: shapes of the network's, by name.
        width: bytes of a weight that is not quantised.
        form: `int8`, `nf4`, or None for a network as it is.
    """
    return sum(_size(name, shape, width, form) for name, shape in tensors.items())


def _size(name: str, shape: Shape, width: int, form: str | None) -> int:
    if form is None or len(shape) != 2 or not IN_BLOCK.search(name):
        return math.prod(shape) * width
    return layer_size(shape, width, form)


def layer_size(shape: Shape, width: int, form: str) -> int:
    """Bytes of a quantised layer's codes and scales; arguments as of `size`, and `form` one of `FORMS`."""
    scales = shape[0] * math.ceil(shape[1] / (FORMS[form].shared or shape[1]))
    return math.prod(shape) * FORMS[form].bits // 8 + scales * width


def made_anew(networks: Iterable[Mapping[str, Shape]], width: int) -> int:
    """Bytes of the weights that the largest quantised layer makes in each call: its values, and their product with scales.

    Args:
        networks: shapes of each network's tensors, by name.
        width: bytes of a weight that is not quantised.
    """
    return 2 * width * max((math.prod(shape) for own in networks for shape in in_blocks(own)), default=0)


def can(networks: Mapping[str, Mapping[str, Shape]], form: str) -> bool:
    """Whether networks, by name, can be quantised, as far as the shapes of their tensors tell."""
    layers = [in_blocks(own) for own in networks.values()]
    shared = FORMS[form].shared or 1
    return all(layers) and not any(shape[1] % shared for own in layers for shape in own)


def in_blocks(tensors: Mapping[str, Shape]) -> list[Shape]:
    """Shapes of the weights that are quantised, of a network's tensors by name."""
    return [shape for name, shape in tensors.items() if len(shape) == 2 and IN_BLOCK.search(name)]
