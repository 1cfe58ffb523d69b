"""Losses of probability ratios for flow models and texts: PPO clip, path clip and soft gate."""

from __future__ import annotations

import math

from flowgrpo.schema.imports.heavy import Tensor, torch

LIMIT = 20.0  # bound of |log ratio| before exp; no gradient beyond it


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of log ratios, clamped to +-`LIMIT`: an infinite ratio in a clip would give the gradient 0 x inf."""
    return torch.exp(log_ratio.clamp(-LIMIT, LIMIT))


def both_bounds(clip_range: float | list[float]) -> tuple[float, float]:
    """Return the lower and upper bound of a clip range, which is one number or a pair."""
    low, high = clip_range if isinstance(clip_range, list) else (clip_range, clip_range)
    return low, high


def clip_loss(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return PPO's loss (E,): max(-A r, -A clip(r, 1 - low, 1 + high)).

    Clip ranges depend on the form of log-probability: averaged over D dimensions, ratios stay within about 1e-3 of 1.
    """
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def clip_mask(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return a mask (E,) of edges that the clip stops: their gradient is zero."""
    return torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low) & (advantage != 0)


def path_bounds(
    position: Tensor, clip_range: float | list[float], *, power: float, dual: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds of a path's log ratio at its t-th factor, each shaped as `position`: low, high and dual clip.

    CTPO (arXiv 2605.07331): bounds grow as t^power, because a sum of t independent terms spreads as t^0.5. `dual` is a
    multiple of the upper bound, or None for infinity.
    """
    low, high = both_bounds(clip_range)
    width = position**power
    return low * width, high * width, (math.inf if dual is None else dual) * high * width


def path_clip_loss(log_ratio: Tensor, advantage: Tensor, bounds: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return PPO's loss with a clip in log space and, where A < 0, a dual clip (arXiv 1912.09729); see `path_bounds`.

    It is max(-A r, -A clip r), and at most |A| exp(dual) where A < 0, written as one clip of log r per sign of A.
    """
    low, high, dual = bounds
    return -advantage * bounded_exp(torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio.clamp(-low, dual)))


def path_clip_mask(log_ratio: Tensor, advantage: Tensor, bounds: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return a mask of the ratios that `path_clip_loss` clips: their gradient is zero."""
    low, high, dual = bounds
    bad = (log_ratio < -low) | (log_ratio > dual)
    return torch.where(advantage > 0, log_ratio > high, bad) & (advantage != 0)


def soft_gate_loss(ratio: Tensor, advantage: Tensor, positive: float, negative: float) -> Tensor:
    """Return SAPO's loss (arXiv 2511.20347): -A f(r), f(r) = 4 / t sigmoid(t (r - 1)), t by the sign of A.

    Its gradient is that of -A r times sech^2(t (r - 1) / 2): full at r = 1, fading where PPO would clip. 1 / t
    corresponds to a clip range, so temperatures too depend on the form of log-probability.
    """
    temperature = torch.where(advantage > 0, positive, negative)
    return -advantage * 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
