"""Rewards of pictures that need no model."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from PIL import Image


def jpeg_size(images: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Return minus the kilobytes of pictures (B, 3, H, W) in [0, 1] as JPEGs of quality 95 (DDPO, 2305.13301)."""
    check_images("jpeg_size", images)
    sizes = []
    for image in images.float().cpu().mul(255).round().byte().permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        sizes.append(-buffer.tell() / 1000)
    return sizes


def check_images(name: str, images: torch.Tensor) -> None:
    """Raise ValueError if `images` is not (B, 3, H, W); `name` is the reward in the message."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"{name} takes images (B, 3, H, W), not shape {tuple(images.shape)}")
