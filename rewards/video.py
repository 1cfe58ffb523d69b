"""Rewards of videos that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def motion(videos: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """How much moves: the mean absolute difference of neighbouring frames, 0 (a still) to 1 (black and white by turns).

    Args:
        videos: float (B, F, 3, H, W) in [0, 1], two frames or more.

    Raises:
        ValueError: these are no such videos.
    """
    if videos.ndim != 5 or videos.shape[1] < 2:
        raise ValueError(f"motion takes videos (B, F, 3, H, W) of two frames or more, not shape {tuple(videos.shape)}")
    return videos.float().diff(dim=1).abs().mean((1, 2, 3, 4)).tolist()
