"""Pictures and clips of a condition are encoded by the VAE once, where pipelines ask for it in each of their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flowgrpo.flow.pipeline.inputs.call_cache import CallCache
from flowgrpo.flow.pipeline.inputs.prompt_embeddings import fingerprint
from flowgrpo.flow.pipeline.networks.switches import decoders

STATES = ("use_tiling", "use_slicing")  # which a VAE may have, and which change what it computes


class EncodedPictures:
    """What the VAEs of a pipeline made of pictures, by the bytes of these.

    A step is a call of the whole pipeline, and an editing pipeline encodes its picture at the beginning of each. What is
    drawn from an encoding is drawn anew by every call.

    Args:
        pipe: left as it is.
    """

    def __init__(self, pipe: DiffusionPipeline):
        self._pipe, self._encodings = pipe, CallCache()
        self._names = [name for name, vae in decoders(pipe).items() if hasattr(vae, "encode")]

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Context in which the VAEs encode no picture that they have encoded before."""
        before = []
        try:
            for name in self._names:
                vae = getattr(self._pipe, name)
                before.append((vae, vars(vae).get("encode")))
                vae.encode = self._sparing(vae, vae.encode)
            yield
        finally:
            for vae, own in before:
                if own is None:
                    del vae.encode
                else:
                    vae.encode = own

    def _sparing(self, vae: torch.nn.Module, encode: Callable[..., Any]) -> Callable[..., Any]:
        """A VAE's `encode`, which computes what it has not computed before."""

        @functools.wraps(encode)
        def spared(*args: Any, **kwargs: Any) -> Any:
            weight = next(vae.parameters())
            states = [getattr(vae, state, None) for state in STATES]
            given = fingerprint([*args, *kwargs, *kwargs.values()])
            key = repr((id(vae), weight.dtype, weight.device, states, given))
            return self._encodings.of(key, lambda: encode(*args, **kwargs))

        return spared
