"""How samples travel to a reward server: a safetensors file of them, with prompts and columns as JSON in its header.

No pickle, and float32 arrives bit for bit. `uint8` is four times smaller and rounds to 256 levels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

CONTENT_TYPE = "application/x-safetensors"
NOT_FINITE = "NaN"  # stands in an answer for a number that is not finite; null there is: not applicable
TRANSPORTS = ("float32", "uint8")


@dataclass(frozen=True)
class Batch:
    """What a reward is called with: samples (B, ...) or B texts, B prompts, columns of B values."""

    samples: torch.Tensor | list[str]
    prompts: list[str]
    columns: dict[str, list[Any]]


def encode(
    samples: torch.Tensor | Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]], transport: str
) -> bytes:
    """The body of a request.

    Args:
        samples: (B, ...), in [0, 1] where `transport` is `uint8`; or B texts, which travel as JSON in the header.
        transport: `float32` or `uint8`.

    Raises:
        ValueError: a column holds what JSON cannot.
    """
    metadata = {"prompts": json.dumps(list(prompts)), "columns": _as_json(columns)}
    if not isinstance(samples, torch.Tensor):
        return _file({"__metadata__": {**metadata, "texts": json.dumps(list(samples))}})
    samples = samples.detach().float().cpu()
    if transport == "uint8":
        samples = samples.mul(255).round().clamp(0, 255).byte()
    data = memoryview(samples.contiguous().numpy()).cast("B")
    kind = "U8" if transport == "uint8" else "F32"
    card = {"dtype": kind, "shape": list(samples.shape), "data_offsets": [0, len(data)]}
    return _file({"__metadata__": metadata, "samples": card}, data)


def _file(header: Mapping[str, Any], data: bytes | memoryview = b"") -> bytes:
    """A safetensors file. Their own `save` takes twenty times as long, and we are waited for."""
    written = json.dumps(header).encode()
    return b"".join([len(written).to_bytes(8, "little"), written, data])


def _as_json(columns: Mapping[str, Sequence[Any]]) -> str:
    parts = []
    for name, values in columns.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(list(values))}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"the column {name!r} cannot travel as JSON: {error}") from None
    return "{" + ", ".join(parts) + "}"


def decode(body: bytes) -> Batch:
    """What `encode` was given; uint8 as float32 in [0, 1].

    Raises:
        ValueError: the body is nothing of the kind; the sentence says where.
    """
    try:
        tensors = load(body)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"the body is no safetensors file ({error})") from None
    header_size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + header_size]).get("__metadata__", {})
    samples = _texts(header) if "texts" in header and not tensors else _tensor(tensors)
    prompts, columns = _part(header, "prompts", list), _part(header, "columns", dict)
    if len(prompts) != len(samples) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts must be {len(samples)} strings, one for each sample")
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != len(samples):
            raise ValueError(f"the column {name!r} must be a list of {len(samples)} values, one for each sample")
    return Batch(samples, prompts, columns)


def _tensor(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if list(tensors) != ["samples"]:
        raise ValueError("the body must hold one tensor, named samples, or texts in its header")
    samples = tensors["samples"]
    if samples.dtype not in (torch.float32, torch.uint8):
        raise ValueError(f"samples are {str(samples.dtype).removeprefix('torch.')}, not float32 or uint8")
    if not 3 <= samples.ndim <= 5 or samples.numel() == 0:
        shape = tuple(samples.shape)
        raise ValueError(f"samples have the shape {shape}, not (B, 3, H, W), (B, F, 3, H, W) or (B, C, N)")
    return samples / 255 if samples.dtype == torch.uint8 else samples


def _texts(header: Mapping[str, str]) -> list[str]:
    texts = _part(header, "texts", list)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts in the header must be strings, one or more")
    return texts


def _part(header: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        part = json.loads(header[name])
    except KeyError:
        raise ValueError(f"the header of the safetensors file must hold {name}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} in the header are no JSON ({type(error).__name__}: {error})") from None
    if not isinstance(part, kind):
        raise ValueError(f"{name} in the header must be a JSON {'list' if kind is list else 'object'}")
    return part
