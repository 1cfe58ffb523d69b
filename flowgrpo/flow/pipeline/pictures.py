"""Pictures and clips of a condition are encoded by the VAE once, where pipelines ask for it in each of their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flowgrpo.flow.pipeline.embeddings import KEPT, fingerprint
from flowgrpo.flow.pipeline.switches import DECODERS
from flowgrpo.training.hollow import mapped

STATES = ("use_tiling", "use_slicing")  # which a VAE may have, and which change what it computes


class EncodedPictures:
    """What the VAEs of a pipeline made of pictures, by the bytes of these; the last `KEPT` bytes of it, or the last one.

    A step is a call of the whole pipeline, and an editing pipeline encodes its picture at the beginning of each. What is
    drawn from an encoding is drawn anew by every call.

    Args:
        pipe: left as it is.
    """

    def __init__(self, pipe: DiffusionPipeline):
        self._pipe = pipe
        self._names = [name for name in DECODERS if hasattr(getattr(pipe, name, None), "encode")]
        self._kept: dict[str, tuple[Any, int]] = {}  # and its bytes

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Context in which the VAEs encode no picture that they have encoded before."""
        before = []
        try:
            for name in self._names:
                vae = getattr(self._pipe, name)
                before.append((vae, vars(vae).get("encode")))
                vae.encode = self._encoding(name, vae, vae.encode)
            yield
        finally:
            for vae, own in before:
                if own is None:
                    del vae.encode
                else:
                    vae.encode = own

    def _encoding(self, name: str, vae: torch.nn.Module, encode: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(encode)
        def kept(*args: Any, **kwargs: Any) -> Any:
            weight = next(vae.parameters())
            states = [getattr(vae, state, None) for state in STATES]
            given = fingerprint([*args, *kwargs, *kwargs.values()])
            key = repr((name, id(vae), weight.dtype, weight.device, states, given))
            found = self._kept.pop(key, None) or _with_size(encode(*args, **kwargs))
            self._kept[key] = found  # the last that will be dropped
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > KEPT:
                del self._kept[next(iter(self._kept))]
            return mapped(torch.clone, found[0])  # pipelines may write into what they are given

        return kept


def _with_size(encoded: Any) -> tuple[Any, int]:
    sizes: list[int] = []
    mapped(lambda x: sizes.append(x.nbytes) or x, encoded)
    return encoded, sum(sizes)
