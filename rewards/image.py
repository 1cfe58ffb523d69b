"""Rewards of pictures that need no model."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from PIL import Image


def jpeg_size(images: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Minus the size in kilobytes of each picture as a JPEG of quality 95: rewards compressible pictures (DDPO, 2305.13301).

    Args:
        images: float (B, 3, H, W) in [0, 1].
    """
    sizes = []
    for image in images.float().cpu().mul(255).round().byte().permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        sizes.append(-buffer.tell() / 1000)
    return sizes
