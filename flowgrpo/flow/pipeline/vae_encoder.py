"""Pictures to a pipeline's latents: its VAE's encoder, and the inverse of what its decoding does to final latents.

What that is, an order of the elements, a scale and a shift, is found by looking: digits go through the pipeline's own
decoding in place of latents, and what reaches the VAE is read off. Nothing about any pipeline is written down here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from samplers.kernels import State

BASE = 16  # of the digits that an element's number is sent in: small enough for half precision


class _Arrived(Exception):
    """The VAE was asked to decode these latents."""

    def __init__(self, latents: torch.Tensor):
        self.latents = latents


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """From pictures to the final states of a policy.

    Attributes:
        shape, dtype: of one state.
        order: (n,) which element of a state each element of the VAE's latents is made of.
        scale, shift: (n,) of it there: latents = scale state + shift.
        latents: shape of the VAE's own.
        size: height and width of the pictures.
    """

    policy: DiffusersPolicy
    shape: torch.Size
    dtype: torch.dtype
    order: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    latents: torch.Size
    size: tuple[int, int]

    @torch.no_grad()
    def encode(self, pictures: torch.Tensor) -> State:
        """Final states (B, ...) of pictures (B, 3, H, W) in [0, 1], of the mode of the VAE's posterior.

        Raises:
            InputError: the VAE's encoder gives latents of another shape than its decoder takes.
        """
        pipe = self.policy.pipe
        weight = next(pipe.vae.parameters())
        pixels = pipe.image_processor.preprocess(pictures).to(self.policy.pipe._execution_device, weight.dtype)
        if len(self.latents) == 4:  # of a video's VAE, to which a picture is one frame
            pixels = pixels.unsqueeze(2)
        encoded = pipe.vae.encode(pixels)
        latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        if latents.shape[1:] != self.latents:
            raise InputError(
                f"model.path: the encoder of {type(pipe).__name__} gives latents of shape {tuple(latents.shape[1:])}, its "
                f"decoder takes {tuple(self.latents)}; pictures cannot become its latents"
            )
        state = torch.empty(len(pictures), len(self.order), device=latents.device)
        state[:, self.order] = (latents.flatten(1).float() - self.shift) / self.scale
        return (state.unflatten(1, self.shape).to(self.dtype),)


@torch.no_grad()
def encoder(policy: DiffusersPolicy, row: Row) -> Encoder:
    """What encodes pictures for a policy.

    Args:
        row: some row, whose call says the pictures' size.

    Raises:
        InputError: the pipeline has no encoder, or its decoding does more than to order, scale and shift its latents.
    """
    pipe, name = policy.pipe, type(policy.pipe).__name__
    vae = getattr(pipe, "vae", None)
    if not (hasattr(vae, "encode") and hasattr(pipe, "image_processor")):
        raise InputError(
            f"model.path: {name} has no VAE that encodes pictures, so preference pairs cannot be its latents"
        )
    start = policy.start([row])
    if len(start) > 1 or policy.walk.pins:
        raise InputError(
            f"model.path: {name} works on more than the latents of one picture, so pairs cannot be encoded"
        )
    height, width = policy.decode(start, [row]).shape[-2:]
    (state,) = start
    count = state[0].numel()

    def arrived(values: torch.Tensor) -> torch.Tensor:
        sent = values.to(state).view_as(state)
        with _caught(vae) as seen:
            policy.decode((sent,), [row])
        (latents,) = seen
        return latents

    zeros = arrived(torch.zeros(count))
    if zeros[0].numel() != count:
        raise InputError(
            f"model.path: {name} decodes other numbers than its latents, so pictures cannot become its latents"
        )
    shift = zeros[0].flatten().float()
    scale = arrived(torch.ones(count))[0].flatten().float() - shift
    numbers, order = torch.arange(count), torch.zeros(count, dtype=torch.long)
    for place in range(math.ceil(math.log(max(count, 2), BASE))):
        digits = numbers // BASE**place % BASE
        found = (arrived(digits.float())[0].flatten().float() - shift) / scale
        if not torch.allclose(found, found.round(), atol=0.25):
            raise _mixes(name)
        order += found.round().long().cpu() * BASE**place
    if not torch.equal(order.sort().values, numbers):
        raise _mixes(name)
    return Encoder(
        policy=policy,
        shape=state.shape[1:],
        dtype=state.dtype,
        order=order.to(shift.device),
        scale=scale,
        shift=shift,
        latents=zeros.shape[1:],
        size=(height, width),
    )


def _mixes(name: str) -> InputError:
    return InputError(
        f"model.path: {name} mixes its latents before they are decoded, so pictures cannot become its latents"
    )


@contextmanager
def _caught(vae: Any) -> Iterator[list[torch.Tensor]]:
    """Within it a VAE decodes nothing; the latents that it was asked to decode are in the list afterwards."""
    seen: list[torch.Tensor] = []
    own = vars(vae).get("decode")
    decode = vae.decode

    def noted(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(latents)
        raise _Arrived(latents)

    vae.decode = noted
    try:
        yield seen
    except _Arrived:
        pass
    finally:
        if own is None:
            del vae.decode
        else:
            vae.decode = decode
