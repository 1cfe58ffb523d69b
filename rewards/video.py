"""Rewards of videos that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import avg_pool2d


def motion(videos: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Return the mean absolute difference of neighbouring frames in (B, F, 3, H, W) in [0, 1]: 0 for a still, at most 1."""
    check_videos("motion", videos, frames=2)
    return videos.float().diff(dim=1).abs().mean((1, 2, 3, 4)).tolist()


def temporal_consistency(videos: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Return the mean similarity of each frame with the frame before it and with the first frame, -1 to 1.

    The form is VBench's subject consistency (arXiv 2311.17982) with structural similarity in place of a model's features:
    the frame before shows flicker, the first frame drift. Unrelated frames earn about 0. A still earns the maximum of 1,
    and less motion earns more, so combine it with a reward that a still cannot earn, such as `motion`.
    """
    check_videos("temporal_consistency", videos, frames=2, side=8)
    scores = []
    for video in videos.unbind():
        now, before, first = video[1:].float(), video[:-1].float(), video[:1].float()
        similarity = structural_similarity(now, before) + structural_similarity(now, first.expand_as(now))
        scores.append((similarity / 2).mean().item())
    return scores


def structural_similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return SSIM (Wang et al. 2004) of (N, 3, H, W) in [0, 1]: mean over colours and 8 x 8 windows in steps of 4, (N,)."""
    mean = partial(avg_pool2d, kernel_size=8, stride=4)
    mean_a, mean_b = mean(a), mean(b)
    variances = mean(a * a) - mean_a**2 + (mean(b * b) - mean_b**2)
    covariance = mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + 0.01**2) / (mean_a**2 + mean_b**2 + 0.01**2)
    structure = (2 * covariance + 0.03**2) / (variances + 0.03**2)
    return (luminance * structure).mean((1, 2, 3))


def check_videos(name: str, videos: torch.Tensor, frames: int = 1, side: int = 1) -> None:
    """Raise ValueError if `videos` is not (B, F, 3, H, W) with at least `frames` frames and `side` pixels per side."""
    if videos.ndim != 5 or videos.shape[1] < frames or videos.shape[2] != 3 or min(videos.shape[3:]) < side:
        least = f"{frames} frames and {side} x {side} pixels or more"
        raise ValueError(f"{name} takes videos (B, F, 3, H, W) of {least}, not shape {tuple(videos.shape)}")
