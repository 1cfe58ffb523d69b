"""What an engine sends: msgpack whose tensors are safetensors, or base64 of them; every size, type and shape is checked.

Nothing that was sent is run: no pickle is read, and what a tensor may be is said before it is looked at. The formats are
those of sgl-project/sglang, python/sglang/multimodal_gen/runtime/entrypoints/post_training: rollout_api.py at 078e5e2a and
io_struct.py at 00e1106f (a list of one map for each sample), utils.py at 067e8f42 (a tensor is a map with `__tensor__`,
`data`, `shape` and `dtype`; later states send `data` as bytes). Not run against an engine.
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
    """The maps of so many samples in an answer.

    Raises:
        EngineError: it is something else.
    """
    try:
        written = msgpack.unpackb(content, raw=False, strict_map_key=True)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:  # msgpack's own are ValueErrors
        raise EngineError(f"answered with what is not msgpack ({str(error)[:80] or type(error).__name__})") from None
    if not isinstance(written, list) or not all(isinstance(each, dict) for each in written):
        raise EngineError("answered with something else than a list of samples")
    if len(written) != count:
        raise EngineError(f"answered with {len(written)} samples where {count} were asked for")
    return written


def tensor(
    written: Any, name: str, shape: Sequence[int | None], dtypes: Sequence[torch.dtype] = FLOATS
) -> torch.Tensor:
    """A tensor that was sent.

    Args:
        name: of it, in errors.
        shape: that it must have; None for any size.
        dtypes: of which it must have one.

    Raises:
        EngineError: it is missing, cannot be read, or is of another shape or type.
    """
    if not isinstance(written, dict) or not written.get(TENSOR):
        raise EngineError(f"sent no tensor as {name}")
    data = written.get("data")
    try:
        raw = base64.b64decode(data, validate=True) if isinstance(data, str) else data
        if not isinstance(raw, bytes):
            raise EngineError(f"sent {name} with data that are {type(data).__name__}, not safetensors")
        (found,) = load(raw).items()
    except (binascii.Error, SafetensorError, ValueError, KeyError) as error:
        raise EngineError(f"sent {name} that is not one tensor in safetensors ({str(error)[:80]})") from None
    sent = found[1]
    fits = sent.ndim == len(shape) and all(want in (None, has) for want, has in zip(shape, sent.shape, strict=True))
    if found[0] != NAME or not fits or sent.dtype not in dtypes:
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        has = " x ".join(map(str, sent.shape)) or "a number"
        raise EngineError(f"sent {name} of {has} in {_word(sent.dtype)}, not {wanted} in {_word(dtypes[0])}")
    return sent


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
