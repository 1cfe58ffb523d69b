"""A cache around a pipeline's `encode_prompt`: each prompt is encoded once; afterwards the encoders may leave the device."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flowgrpo.data.tensor_maps import map_tensors
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.inputs.call_cache import CallCache, tensor_bytes
from flowgrpo.flow.pipeline.inputs.cut_prompts import CutPrompts
from flowgrpo.flow.pipeline.networks.traits import ENCODERS
from samplers.drawing import to_device


@dataclass(frozen=True)
class EmbeddingShape:
    """Shapes of the outputs of `encode_prompt` for one row.

    `parts` has for each output: the shape of a tensor, the type `list` for a list, else the value itself. `masked` tells
    whether one output is an attention mask, so that embeddings can be padded to a common length. `nbytes` are the bytes
    of all outputs.
    """

    parts: tuple[Any, ...]
    masked: bool
    nbytes: int

    def batch_key(self, pads_prompts: bool) -> Any:
        """Return a key that must be equal for rows to share a batch; `pads_prompts` allows unequal lengths."""
        return tuple(type(p) for p in self.parts) if pads_prompts and self.masked else self.parts


@dataclass(frozen=True)
class RestingEncoder:
    """A placeholder in a pipeline for a text encoder that is offloaded or freed."""

    dtype: Any
    device: torch.device
    config: Any


class EmbeddingCache:
    """A cache that replaces `pipe.encode_prompt`: it keeps each row's embeddings, and assembles batches of them.

    Each row is encoded alone. In a batch its embeddings would differ by rounding, or by padding, with the rows beside it,
    which are others after a resume and in another process. All embeddings stay in host memory, the latest used ones on
    the device, too.

    Args:
        after_encoding: how `offload` treats the text encoders: `keep` leaves them, `offload` moves them to host memory (and
            back for a new prompt), `free` drops them.

    Attributes:
        cut: the prompts that an encoder truncated.
        seen: if a list, it collects the `EmbeddingShape`s of requested rows.
    """

    def __init__(self, pipe: DiffusionPipeline, after_encoding: str = "keep"):
        self.pipe, self.after_encoding = pipe, after_encoding
        self.seen: list[EmbeddingShape] | None = None
        self.cut = CutPrompts()
        self._placed = CallCache()
        self._outputs: dict[str, Any] = {}
        self._offloaded: dict[str, torch.nn.Module] = {}
        self._freed = False
        if hasattr(pipe, "encode_prompt"):
            self._encode = pipe.encode_prompt
            self._signature = inspect.signature(self._encode)
            pipe.encode_prompt = self

    def __call__(self, *args, **kwargs):
        """Return the result of the pipeline's own `encode_prompt` for these arguments."""
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        prompt = arguments.get("prompt")
        count = len(prompt) if isinstance(prompt, list) else 1
        if isinstance(prompt, str):
            arguments["prompt"] = [prompt]
        rows = [
            {
                k: [v[i]] if "prompt" in k and isinstance(v, list) and len(v) == count else v
                for k, v in arguments.items()
            }
            for i in range(count)
        ]
        device = torch.device(arguments.get("device") or self.pipe._execution_device)
        outputs = [self._encode_row(row, device) for row in rows]
        if self.seen is not None:
            self.seen += [_shape(output) for output in outputs]
        return _assemble(outputs)

    def offload(self) -> None:
        """Free the text encoders' device memory, as `after_encoding` says, until a new prompt needs them."""
        if self.after_encoding == "keep":
            return
        for name, module in self.pipe.components.items():
            if name.startswith(ENCODERS) and isinstance(module, torch.nn.Module):
                if self.after_encoding == "offload":
                    self._offloaded[name] = module.to("cpu")
                # diffusers' own `__setattr__` would rewrite the pipeline's config.
                resting = RestingEncoder(module.dtype, self.pipe.device, module.config)
                object.__setattr__(self.pipe, name, resting)
        self._freed = self.after_encoding == "free"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self, device: torch.device | str | None = None) -> None:
        """Put the text encoders back, by default on the pipeline's device; raise InputError if they were freed."""
        if self._freed:
            raise InputError("the text encoders were freed: set model.text_encoders=offload to have them again")
        if not self._offloaded:
            return
        device = device or self.pipe.device
        for name, module in self._offloaded.items():
            # Set before the move, so that `offload` finds it even if the move fails halfway.
            object.__setattr__(self.pipe, name, module)
            module.to(device)
        self._offloaded = {}

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Return a context in which offloaded text encoders are back in the pipeline, on the CPU, so it can be saved."""
        were_offloaded = bool(self._offloaded)
        self.restore("cpu")
        try:
            yield
        finally:
            if were_offloaded:
                self.offload()

    def _encode_row(self, arguments: dict[str, Any], device: torch.device) -> Any:
        """Return the output of `encode_prompt` for one row, on `device`; the encoders run for new rows only."""
        key = repr([(name, fingerprint(value)) for name, value in arguments.items()])
        if key not in self._outputs:
            were_offloaded = bool(self._offloaded) or self._freed
            try:
                self.restore()
                with torch.no_grad(), self.cut.counted(arguments.get("prompt")):
                    self._outputs[key] = _to(self._encode(**arguments), "cpu")
            finally:
                if were_offloaded:
                    self.offload()
        return self._placed.of((key, device), lambda: _to(self._outputs[key], device))


def _shape(output: Any) -> EmbeddingShape:
    parts = output if isinstance(output, tuple) else (output,)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    shapes = [list if isinstance(p, list) else tuple(p.shape) if isinstance(p, torch.Tensor) else p for p in parts]
    masked = any(not t.is_floating_point() and t.ndim > 1 for t in tensors)
    return EmbeddingShape(tuple(shapes), masked, tensor_bytes(output))


def fingerprint(value: Any) -> Any:
    """Return a value whose repr identifies the content of `value`; tensors and images become digests."""
    if isinstance(value, (list, tuple)):
        return [fingerprint(item) for item in value]
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (tuple(value.shape), value.dtype, hashlib.blake2b(data).hexdigest())
    if hasattr(value, "tobytes"):
        return (getattr(value, "size", None), hashlib.blake2b(value.tobytes()).hexdigest())
    return value


def _assemble(rows: list[Any]) -> Any:
    """Join the outputs of single rows into the pipeline's output for the batch; tensors are always new."""
    first = rows[0]
    if isinstance(first, tuple):
        return tuple(_assemble(list(column)) for column in zip(*rows, strict=True))
    if isinstance(first, list):
        return [map_tensors(torch.clone, item) for row in rows for item in row]
    if not isinstance(first, torch.Tensor):
        return first
    if any(row.shape[0] != 1 for row in rows):  # a tensor that all rows share, such as position ids
        return max(rows, key=len).clone()
    if first.ndim > 1:
        longest = max(row.shape[1] for row in rows)
        rows = [_pad(row, longest) for row in rows]
    return torch.cat(rows)


def _pad(row: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - row.shape[1]
    return torch.cat([row, row.new_zeros(1, missing, *row.shape[2:])], dim=1) if missing else row


def _to(output: Any, device: torch.device | str) -> Any:
    if isinstance(output, torch.Tensor):
        return to_device(output, torch.device(device))
    if isinstance(output, (tuple, list)):
        return type(output)(_to(item, device) for item in output)
    return output
