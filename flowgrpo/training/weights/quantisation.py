"""Quantisation of a frozen base to 8 or 4 bits, under adapters that are trained in float32.

Linear layers in a network's repeated blocks store codes and scales. They dequantise their weights in every forward and
backward pass, so that no autograd graph keeps dequantised weights. Small layers outside of the blocks (embeddings,
heads, time) are not quantised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flowgrpo.errors import InputError
from flowgrpo.training.model_files.hub_files import Shape

Tensor = torch.Tensor
IN_BLOCK = re.compile(r"(?:^|\.)\d+\..+\.weight$")  # blocks are numbered

# The 16 values of NormalFloat4: quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, arXiv 2305.14314, appendix E).
NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A format for the weights (out, in) of a layer: each weight is a scale times the value of a code."""

    bits: int  # bits per code
    most: float  # value of the largest code; the largest weight that shares a scale gets it
    shared: int | None = None  # number of neighbouring weights in a row that share a scale; None for the whole row
    table: tuple[float, ...] | None = None  # values of the codes, which are indices, two per byte; None: int8 codes

    def encode(self, normed: Tensor) -> Tensor:
        """Return the codes, one row per output, of float32 weights (out, in) that were divided by their scales."""
        if self.table is None:
            return normed.round().clamp(-self.most, self.most).to(torch.int8)
        table = torch.tensor(self.table, device=normed.device)
        nearest = torch.bucketize(normed, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        return nearest[:, 0::2] << 4 | nearest[:, 1::2]

    def decode(self, codes: Tensor, scale: Tensor, pairs: Tensor | None) -> Tensor:
        """Return the weights (out, in) in the dtype of `scale`.

        With a table, `pairs` (256, 2) are the two values of each byte; otherwise it is None.
        """
        if pairs is None:
            values = codes.to(scale.dtype)
        else:
            values = torch.nn.functional.embedding(codes.int(), pairs.to(scale.dtype)).flatten(1)
        return (values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)


FORMS = {"int8": Form(bits=8, most=127.0), "nf4": Form(bits=4, most=1.0, shared=64, table=NORMAL_FLOAT)}


class _Product(torch.autograd.Function):
    """The product of a quantised linear layer; `stored` are codes, scale and pairs. Only the input gets a gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, form: Form, *stored: Any) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*stored)
        return torch.nn.functional.linear(x, form.decode(*stored), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ ctx.form.decode(*ctx.saved_tensors), *[None] * 5


class QuantisedLinear(torch.nn.Linear):
    """A frozen linear layer that stores codes, one row per output, and scales (out, scales per row)."""

    pairs: Tensor | None

    def __init__(self, linear: torch.nn.Linear, form: str):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.form = linear.in_features, linear.out_features, FORMS[form]
        self.bias = linear.bias
        weight, most = linear.weight.detach(), self.form.most
        blocks = weight.float().unflatten(1, (-1, self.form.shared or linear.in_features))
        least = torch.finfo(weight.dtype).tiny
        scale = (blocks.abs().amax(2) / most).clamp(min=least).to(weight.dtype)
        codes = self.form.encode((blocks / scale[..., None].float()).flatten(1))
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        pairs = None
        if self.form.table is not None:
            table = torch.tensor(self.form.table, dtype=scale.dtype, device=scale.device)
            pairs = torch.cartesian_prod(table, table)
        self.register_buffer("pairs", pairs, persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in torch
        """The dequantised weights (out, in), a copy."""
        return self.form.decode(self.codes, self.scale, self.pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product (..., out) with x (..., in)."""
        return _Product.apply(x, self.bias, self.form, self.codes, self.scale, self.pairs)


@torch.no_grad()
def quantise(module: torch.nn.Module, form: str) -> None:
    """Quantise the linear layers in a network's blocks in place. Raises as `layers_in_blocks` and `check_layer`."""
    for path, layer in layers_in_blocks(module, "model.quantise").items():
        check_layer(path, layer, form, "model.quantise")
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, QuantisedLinear(layer, form))


def layers_in_blocks(module: torch.nn.Module, key: str) -> dict[str, torch.nn.Linear]:
    """Return the linear layers in a network's blocks by path, without those of adapters.

    Raises InputError, with config key `key`, if there are none or if they are quantised already.
    """
    if getattr(module.config, "quantization_config", None) is not None:
        raise InputError(f"{key}: the model's weights are quantised already in its files, set it to null")
    layers = {
        path: m
        for path, m in module.named_modules()
        if type(m) is torch.nn.Linear and IN_BLOCK.search(f"{path}.weight") and ".lora_" not in path
    }
    if not layers:
        raise InputError(f"{key}: {type(module).__name__} has no linear layers in repeated blocks, set it to null")
    return layers


def check_layer(path: str, layer: torch.nn.Linear, form: str, key: str) -> None:
    """Raise InputError if a layer's rows do not divide into groups that share a scale, or if a weight is not finite."""
    shared = FORMS[form].shared
    if shared is not None and layer.in_features % shared:
        raise InputError(
            f"{key}: {form} takes blocks of {shared} weights, {path} has rows of {layer.in_features}; take int8"
        )
    check_finite(path, layer, key)


def check_finite(path: str, layer: torch.nn.Linear, key: str) -> None:
    """Raise InputError if a weight of a layer is not finite."""
    if not layer.weight.is_meta and not layer.weight.isfinite().all():  # a plan has meta weights
        raise InputError(f"{key}: the weights of {path} are not finite")


def refuse_dynamic(module: torch.nn.Module) -> None:
    """Raise InputError if a network's files ask for dynamically quantised activations."""
    written = getattr(module.config, "quantization_config", None)
    if "DynamicActivation" in str(written):
        raise InputError(
            "model.path: its files quantise activations as they come, where gradients stop before they reach an adapter; "
            "take weights that are not quantised, or weights alone"
        )


def size(tensors: Mapping[str, Shape], width: int, form: str | None) -> int:
    """Return the bytes of a frozen network; unquantised weights (all, if `form` is None) have `width` bytes each."""
    return sum(
        math.prod(shape) * width if form is None or not _is_quantised(name, shape) else layer_size(shape, width, form)
        for name, shape in tensors.items()
    )


def layer_size(shape: Shape, width: int, form: str) -> int:
    """Return the bytes of a quantised layer's codes and scales. Arguments: see `size`."""
    scales = shape[0] * math.ceil(shape[1] / (FORMS[form].shared or shape[1]))
    return math.prod(shape) * FORMS[form].bits // 8 + scales * width


def dequantised_bytes(networks: Iterable[Mapping[str, Shape]], width: int) -> int:
    """Return the bytes that the largest layer needs to dequantise its weights: code values, and values times scales."""
    return 2 * width * max((math.prod(shape) for tensors in networks for shape in in_blocks(tensors)), default=0)


def can(networks: Mapping[str, Mapping[str, Shape]], form: str) -> bool:
    """Return whether networks can be quantised to `form`, given the shapes of each network's tensors."""
    layers = [in_blocks(tensors) for tensors in networks.values()]
    shared = FORMS[form].shared or 1
    return all(layers) and not any(shape[1] % shared for shapes in layers for shape in shapes)


def in_blocks(tensors: Mapping[str, Shape]) -> list[Shape]:
    """Return the shapes of the weights that quantisation would quantise, from the shapes of a network's tensors."""
    return [shape for name, shape in tensors.items() if _is_quantised(name, shape)]


def _is_quantised(name: str, shape: Shape) -> bool:
    return len(shape) == 2 and IN_BLOCK.search(name) is not None
