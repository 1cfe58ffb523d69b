"""Rewards of videos that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import avg_pool2d


def motion(videos: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """How much moves: the mean absolute difference of neighbouring frames, 0 (a still) to 1 (black and white by turns).

    Args:
        videos: float (B, F, 3, H, W) in [0, 1], two frames or more.

    Raises:
        ValueError: these are not such videos.
    """
    check_videos("motion", videos, frames=2)
    return videos.float().diff(dim=1).abs().mean((1, 2, 3, 4)).tolist()


def temporal_consistency(videos: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """How alike the frames are: over all frames after the first, the mean likeness with the frame before and with the first.

    In -1 to 1. The form is VBench's subject consistency (arXiv 2311.17982) with structural similarity in place of a model's
    features: the frame before tells flicker, the first one drift. Unrelated frames earn about 0. The trap: a still earns 1,
    the most there is, and whatever moves less earns more. Train on it only beside a reward that a still cannot earn, such as
    `motion`.

    Args:
        videos: float (B, F, 3, H, W) in [0, 1], two frames or more of 8 x 8 pixels or more.

    Raises:
        ValueError: these are not such videos.
    """
    check_videos("temporal_consistency", videos, frames=2, side=8)
    return [_consistency(video.float()) for video in videos]


def _consistency(video: torch.Tensor) -> float:
    now, before, first = video[1:], video[:-1], video[:1].expand_as(video[1:])
    return ((structural_similarity(now, before) + structural_similarity(now, first)) / 2).mean().item()


def structural_similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean structural similarity (SSIM; Wang et al. 2004) over colours and windows of 8 x 8 pixels in steps of 4.

    Args:
        a, b: float (N, 3, H, W) in [0, 1].

    Returns:
        (N,), -1 to 1; 1 where both are equal.
    """

    def mean(x: torch.Tensor) -> torch.Tensor:
        return avg_pool2d(x, 8, 4)

    mean_a, mean_b = mean(a), mean(b)
    variances = mean(a * a) - mean_a**2 + (mean(b * b) - mean_b**2)
    covariance = mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + 0.01**2) / (mean_a**2 + mean_b**2 + 0.01**2)
    structure = (2 * covariance + 0.03**2) / (variances + 0.03**2)
    return (luminance * structure).mean((1, 2, 3))


def check_videos(name: str, videos: torch.Tensor, frames: int = 1, side: int = 1) -> None:
    """Refuse what is not a batch of videos with that many frames and pixels a side, in the name of a reward."""
    if videos.ndim != 5 or videos.shape[1] < frames or videos.shape[2] != 3 or min(videos.shape[3:]) < side:
        least = f"{frames} frames and {side} x {side} pixels or more"
        raise ValueError(f"{name} takes videos (B, F, 3, H, W) of {least}, not shape {tuple(videos.shape)}")
