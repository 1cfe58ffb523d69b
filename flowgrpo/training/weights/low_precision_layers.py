"""Linear layers that multiply in bfloat16, int8 or fp8, without a gradient, as copies of layers of a network."""

from __future__ import annotations

import torch

from flowgrpo.errors import InputError
from flowgrpo.training.model_files.hub_files import Shape

Tensor = torch.Tensor
MOST = {"int8": 127.0, "fp8": 448.0}  # value of the largest code, which the largest number of a row gets
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LEAST = 1e-30  # largest number of a row of zeros, whose scale is not 0
MULTIPLE = 16  # GPUs multiply codes of layers whose numbers of inputs and outputs it divides
FEW = 17  # PyTorch multiplies int8 codes on GPUs only of so many rows or more


class HalfLinear(torch.nn.Linear):
    """A frozen linear layer that multiplies in bfloat16 and returns the dtype of its input."""

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = torch.nn.Parameter(linear.weight.detach().to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product (..., out) with x (..., in)."""
        product = torch.nn.functional.linear(x.to(torch.bfloat16), self.weight).to(x.dtype)
        return product if self.bias is None else product + self.bias.to(x.dtype)


class EightBitLinear(torch.nn.Linear):
    """A frozen linear layer that multiplies `int8` or `fp8` (e4m3) codes.

    Each output's weights, and each row of an input as it comes, are codes times a float32 scale: the row's largest absolute
    value over that of the codes. int8 products are summed exactly; of fp8 the product is rounded to bfloat16.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, linear: torch.nn.Linear, word: str):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.word = word
        codes, scale = _encode(linear.weight.detach(), word)
        self.register_buffer("codes", codes, persistent=False)  # no parameters, whose dtype would be the network's
        self.register_buffer("scale", scale[:, 0], persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in torch
        """The weights (out, in) that the codes stand for, float32, a copy."""
        return self.codes.float() * self.scale[:, None]

    @torch.no_grad()  # compiled blocks trace a backward pass, which these products have not
    def forward(self, x: Tensor) -> Tensor:
        """Return the product (..., out) with x (..., in), in autocast's dtype or that of x; without gradient."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        codes, scale = _encode(x.reshape(-1, self.in_features).contiguous(), self.word)
        product = _multiply(codes, scale, self.codes, self.scale).to(dtype)
        return (product if self.bias is None else product.add_(self.bias)).view(*x.shape[:-1], self.out_features)


def _encode(rows: Tensor, word: str) -> tuple[Tensor, Tensor]:
    """Return the codes (rows, columns) of numbers, and float32 scales (rows, 1)."""
    scale = rows.abs().amax(1, keepdim=True).float().clamp_(min=LEAST) / MOST[word]
    normed = rows / scale
    return (normed.round_() if word == "int8" else normed).to(CODES[word]), scale


def _multiply(codes: Tensor, scale: Tensor, weights: Tensor, of_weights: Tensor) -> Tensor:
    """Return the product (rows, out) of codes (rows, in) and weights (out, in), with scales (rows, 1) and (out,)."""
    if weights.dtype != torch.int8:
        return torch._scaled_mm(
            codes, weights.t(), scale, of_weights[None], out_dtype=torch.bfloat16, use_fast_accum=True
        )
    rows = len(codes)
    if rows < FEW:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, FEW - rows))
    return (torch._int_mm(codes, weights.t())[:rows] * of_weights).mul_(scale)


def fits(shape: Shape) -> bool:
    """Return whether a layer with weights of this shape can be an `EightBitLinear`."""
    return not any(size % MULTIPLE for size in shape)


def size(shape: Shape) -> int:
    """Return the bytes of the codes and scales of an `EightBitLinear` with weights of this shape."""
    rows, columns = shape
    return rows * columns + 4 * rows


def try_product(word: str, key: str, device: torch.device) -> None:
    """Multiply a small layer in `int8` or `fp8`; raise InputError, with the config key `key`, if the device cannot."""
    linear = torch.nn.Linear(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16)
    try:
        EightBitLinear(linear, word)(linear.weight.detach())
    except RuntimeError as error:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a device of type {device.type}"
        instead = "int8" if word == "fp8" else "null"
        raise InputError(f"{key}: {name} does not multiply in {word}; take {instead}") from error
