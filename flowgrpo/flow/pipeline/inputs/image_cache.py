"""A cache of VAE encodings, because editing pipelines encode the same picture in each of their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flowgrpo.data.tensor_maps import map_tensors
from flowgrpo.flow.pipeline.inputs.call_cache import CallCache
from flowgrpo.flow.pipeline.inputs.prompt_embeddings import fingerprint
from flowgrpo.flow.pipeline.networks.switches import decoders

STATES = ("use_tiling", "use_slicing")  # switches of a VAE that change its result


class EncodedPictures:
    """A cache of the encodings of a pipeline's VAEs; keys are the contents of pictures.

    Each step is a call of the whole pipeline, and an editing pipeline encodes its picture at the start of each call. Only
    the posterior is cached; each call still samples from it.
    """

    def __init__(self, pipe: DiffusionPipeline):
        self._pipe, self._encodings = pipe, CallCache()
        self._names = [name for name, vae in decoders(pipe).items() if hasattr(vae, "encode")]

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Return a context in which the VAEs encode each picture only once."""
        before = []
        try:
            for name in self._names:
                vae = getattr(self._pipe, name)
                before.append((vae, vars(vae).get("encode")))
                vae.encode = self._sparing(vae, vae.encode)
            yield
        finally:
            for vae, original in before:
                if original is None:
                    del vae.encode
                else:
                    vae.encode = original

    def _sparing(self, vae: torch.nn.Module, encode: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(encode)
        def spared(*args: Any, **kwargs: Any) -> Any:
            weight = next(vae.parameters())
            states = [getattr(vae, state, None) for state in STATES]
            given = fingerprint([*args, *kwargs, *kwargs.values()])
            key = repr((id(vae), weight.dtype, weight.device, states, given))
            encoding = self._encodings.of(key, lambda: encode(*args, **kwargs))
            return map_tensors(torch.clone, encoding)  # pipelines may overwrite it

        return spared
