"""Requests to a reward server: a safetensors file of samples, with prompts and columns as JSON in its header."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CONTENT_TYPE = "application/x-safetensors"
NOT_FINITE = "NaN"  # in an answer, a number that is not finite; null is: not applicable
MOST_HEADER = 8 << 20  # bytes of prompts, columns and texts; parsed JSON may take forty times as much
TRANSPORTS = ("float32", "uint8")
DTYPES = {"F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True)
class Batch:
    """A reward's arguments: samples (B, ...) as transported (see `as_floats`) or B texts, B prompts, columns of B values."""

    samples: torch.Tensor | list[str]
    prompts: list[str]
    columns: dict[str, list[Any]]


def encode(
    samples: torch.Tensor | Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]], transport: str
) -> list[bytes | memoryview]:
    """Return the body of a request in consecutive parts; raise ValueError if a column is not serialisable as JSON.

    Samples are (B, ...), in [0, 1] if `transport` is `uint8`, or B texts, which become JSON in the header.
    """
    metadata = {"prompts": json.dumps(list(prompts)), "columns": _as_json(columns)}
    if not isinstance(samples, torch.Tensor):
        return _file({"__metadata__": {**metadata, "texts": json.dumps(list(samples))}})
    samples = samples.detach().float().cpu()
    if transport == "uint8":
        samples = samples.mul(255).round().clamp(0, 255).byte()
    data = samples.contiguous().numpy().data.cast("B")
    kind = "U8" if transport == "uint8" else "F32"
    card = {"dtype": kind, "shape": list(samples.shape), "data_offsets": [0, len(data)]}
    return _file({"__metadata__": metadata, "samples": card}, data)


def _file(header: Mapping[str, Any], data: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """Return a safetensors file in parts; the library's `save` takes twenty times as long."""
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)  # aligns the numbers
    return [len(written).to_bytes(8, "little"), written, data]


def _as_json(columns: Mapping[str, Sequence[Any]]) -> str:
    parts = []
    for name, values in columns.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(list(values))}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"the column {name!r} cannot travel as JSON: {error}") from None
    return "{" + ", ".join(parts) + "}"


def header_bytes(body: bytes | bytearray) -> int:
    """Return the announced length of the header."""
    return int.from_bytes(body[:8], "little")


def as_floats(samples: torch.Tensor) -> torch.Tensor:
    """Convert uint8 levels to float32 in [0, 1]; return float32 unchanged."""
    return samples / 255 if samples.dtype == torch.uint8 else samples


def decode(body: bytearray) -> Batch:
    """Return what `encode` was given, samples as a view of the body; raise ValueError at the first fault."""
    if header_bytes(body) > min(MOST_HEADER, len(body)):
        raise ValueError(f"the body is not a safetensors file with a header of {MOST_HEADER} bytes at most")
    start = 8 + header_bytes(body)
    try:
        tensors = json.loads(bytes(body[8:start]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not a safetensors file ({type(error).__name__}: {error})") from None
    header = tensors.pop("__metadata__", {}) if isinstance(tensors, dict) else None
    if not isinstance(header, dict):
        raise ValueError("the body is not a safetensors file (its header is not a JSON object of objects)")
    only_texts = "texts" in header and not tensors and len(body) == start
    samples = _texts(header) if only_texts else _tensor(tensors, body, start)
    prompts, columns = _part(header, "prompts", list), _part(header, "columns", dict)
    if len(prompts) != len(samples) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts must be {len(samples)} strings, one for each sample")
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != len(samples):
            raise ValueError(f"the column {name!r} must be a list of {len(samples)} values, one for each sample")
    return Batch(samples, prompts, columns)


def _tensor(tensors: Mapping[str, Any], body: bytearray, start: int) -> torch.Tensor:
    """Return the samples, whose data begin at `start`."""
    if list(tensors) != ["samples"]:
        raise ValueError("the body must hold one tensor, named samples, or texts in its header")
    try:
        kind, shape, offsets = (tensors["samples"][key] for key in ("dtype", "shape", "data_offsets"))
    except (TypeError, KeyError):
        raise ValueError("the body is not a safetensors file (samples have no dtype, shape and data_offsets)") from None
    if kind not in list(DTYPES):
        raise ValueError(f"samples are {kind}, not {' or '.join(DTYPES)}")
    is_shape = isinstance(shape, list) and all(type(n) is int and 0 < n <= sys.maxsize for n in shape)
    if not is_shape or not 3 <= len(shape) <= 5:
        raise ValueError(f"samples have the shape {shape}, not (B, 3, H, W), (B, F, 3, H, W) or (B, C, N)")
    size = math.prod(shape) * DTYPES[kind].itemsize
    if offsets != [0, size] or len(body) != start + size:
        raise ValueError(
            f"the body is not a safetensors file (samples need {size} bytes, and nothing else stands there)"
        )
    return torch.frombuffer(body, dtype=DTYPES[kind], offset=start).view(shape)


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
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} in the header are not JSON ({type(error).__name__}: {error})") from None
    if not isinstance(part, kind):
        raise ValueError(f"{name} in the header must be a JSON {'list' if kind is list else 'object'}")
    return part
