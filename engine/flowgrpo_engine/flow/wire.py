"""Decode an engine's answers: msgpack with tensors as safetensors, or as base64 of safetensors.

Nothing in an answer is executed, and no pickle is read. The caller says which shape and dtypes a tensor may have. The
formats are those of sgl-project/sglang, python/sglang/multimodal_gen/runtime/entrypoints/post_training: rollout_api.py at
078e5e2a and io_struct.py at 00e1106f (a list with a map per sample), utils.py at 067e8f42 (a tensor is a map with
`__tensor__`, `data`, `shape` and `dtype`; later versions send `data` as bytes). Not tested against a real engine.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from flowgrpo.schema.imports.lazy import lazy
from flowgrpo_engine.service import EngineError

if TYPE_CHECKING:
    import msgpack
else:
    msgpack = lazy("msgpack")

TENSOR = "__tensor__"
NAME = "t"  # of the one tensor in a file
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def samples(content: bytes, count: int) -> list[dict[str, Any]]:
    """Return the maps of the `count` samples in an answer.

    Raises:
        EngineError: the answer is something else.
    """
    try:
        written = msgpack.unpackb(content, raw=False, strict_map_key=True)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:  # msgpack's errors are ValueErrors
        raise EngineError(
            f"answered in another format than msgpack ({str(error)[:80] or type(error).__name__})"
        ) from None
    if not isinstance(written, list) or not all(isinstance(each, dict) for each in written):
        raise EngineError("did not answer with a list of samples")
    if len(written) != count:
        raise EngineError(f"answered with {len(written)} samples instead of {count}")
    return written


def tensor(
    written: Any, name: str, shape: Sequence[int | None], dtypes: Sequence[torch.dtype] = FLOATS
) -> torch.Tensor:
    """Return a tensor of an answer.

    Args:
        written: the entry of the answer.
        name: name of the tensor in errors.
        shape: the required shape; None for any size.
        dtypes: the allowed dtypes.

    Raises:
        EngineError: the tensor is missing, cannot be read, or has another shape or dtype.
    """
    if not isinstance(written, dict) or not written.get(TENSOR):
        raise EngineError(f"sent no tensor as {name}")
    data = written.get("data")
    try:
        raw = base64.b64decode(data, validate=True) if isinstance(data, str) else data
        if not isinstance(raw, bytes):
            raise EngineError(f"sent {name} as {type(data).__name__} instead of safetensors")
        ((tensor_name, sent),) = load(raw).items()
    except (binascii.Error, SafetensorError, ValueError, KeyError) as error:
        raise EngineError(f"sent {name} that is not one tensor in safetensors ({str(error)[:80]})") from None
    fits = sent.ndim == len(shape) and all(want in (None, has) for want, has in zip(shape, sent.shape, strict=True))
    if tensor_name != NAME or not fits or sent.dtype not in dtypes:
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        has = " x ".join(map(str, sent.shape)) or "a number"
        raise EngineError(f"sent {name} of {has} in {_word(sent.dtype)}, not {wanted} in {_word(dtypes[0])}")
    return sent


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
