"""Encoding of pictures to a pipeline's latents: the VAE's encoder, then the inverse of the steps before its decoder.

Before decoding, pipelines reorder, scale and shift their latents. A probe finds out how: known digits pass through the
pipeline's own decoding, and the VAE's input shows where they arrive. No pipeline is hard-coded here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageOps

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from rewards.audio import tensors
from samplers.kernels import State

BASE = 16  # base in which element indices are written as digits, which are exact in half precision


class _DecodingStopped(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes pictures to final states of a policy.

    Attributes:
        shape, dtype: shape of one state, and its dtype.
        order: (n,) for each element of the VAE's latents, its index in a flattened state.
        scale, shift: (n,), so that latents = scale * state + shift.
        latents: shape of the VAE's latents.
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
        """Encode pictures (B, 3, H, W) in [0, 1] to final states (B, ...), by the mode of the VAE's posterior.

        Raise InputError if the VAE's encoder and decoder have latents of unequal shapes.
        """
        pipe = self.policy.pipe
        weight = next(pipe.vae.parameters())
        pixels = pipe.image_processor.preprocess(pictures).to(self.policy.pipe._execution_device, weight.dtype)
        if len(self.latents) == 4:  # a video VAE: a picture is one frame
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
    """Build the picture encoder of a policy, for pictures of the size that it samples for `row`, which may be any row.

    Raise InputError if the pipeline has no VAE encoder, or does more to its latents than reorder, scale and shift them.
    """
    pipe, name = policy.pipe, type(policy.pipe).__name__
    vae = getattr(pipe, "vae", None)
    if not (hasattr(vae, "encode") and hasattr(pipe, "image_processor")):
        raise InputError(f"model.path: {name} has no VAE that encodes pictures, so pictures cannot become its latents")
    start = policy.start([row])
    if len(start) > 1 or policy.walk.pins:
        raise InputError(
            f"model.path: {name} works on more than the latents of one picture, so pictures cannot become its latents"
        )
    height, width = tensors(policy.decode(start, [row]))[0].shape[-2:]
    (state,) = start
    count = state[0].numel()

    def vae_input(values: torch.Tensor) -> torch.Tensor:
        with _capture_decoding(vae) as captured:
            policy.decode((values.to(state).view_as(state),), [row])
        (latents,) = captured
        return latents

    zeros = vae_input(torch.zeros(count))
    if zeros[0].numel() != count:
        raise InputError(
            f"model.path: {name} decodes other numbers than its latents, so pictures cannot become its latents"
        )
    shift = zeros[0].flatten().float()
    scale = vae_input(torch.ones(count))[0].flatten().float() - shift
    numbers, order = torch.arange(count), torch.zeros(count, dtype=torch.long)
    for place in range(math.ceil(math.log(max(count, 2), BASE))):
        digits = numbers // BASE**place % BASE
        arrived = (vae_input(digits.float())[0].flatten().float() - shift) / scale
        if not torch.allclose(arrived, arrived.round(), atol=0.25):
            raise _mixes(name)
        order += arrived.round().long().cpu() * BASE**place
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


def fit(picture: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """Return a picture as (3, H, W) in [0, 1], scaled and center-cropped to `size` (H, W)."""
    height, width = size
    fitted = ImageOps.fit(picture.convert("RGB"), (width, height), Image.Resampling.BICUBIC)
    return torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8).view(height, width, 3).movedim(2, 0) / 255


def _mixes(name: str) -> InputError:
    return InputError(
        f"model.path: {name} mixes its latents before they are decoded, so pictures cannot become its latents"
    )


@contextmanager
def _capture_decoding(vae: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the latents that reach the VAE's decoder, and stop the call there."""
    captured: list[torch.Tensor] = []
    before = vars(vae).get("decode")

    def capture(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        captured.append(latents)
        raise _DecodingStopped

    vae.decode = capture
    try:
        with suppress(_DecodingStopped):
            yield captured
    finally:
        if before is None:
            del vae.decode
        else:
            vae.decode = before
