"""Losses on probability ratios, for flow models and language models: PPO clip, path clip and soft gate."""

from __future__ import annotations

import math

from flowgrpo.schema.imports.heavy import Tensor, torch

LIMIT = 20.0  # bound of |log ratio| before exp; no gradient beyond it


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), with the log ratio clamped to +-`LIMIT`.

    Without the clamp, an infinite ratio that PPO's clip stops would have the gradient 0 x inf.
    """
    return torch.exp(log_ratio.clamp(-LIMIT, LIMIT))


def both_bounds(clip_range: float | list[float]) -> tuple[float, float]:
    """Return the lower and upper bound of a clip range that is one number or a pair."""
    low, high = clip_range if isinstance(clip_range, list) else (clip_range, clip_range)
    return low, high


def clip_loss(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return PPO's loss (E,): max(-A r, -A clip(r, 1 - low, 1 + high)).

    A good clip range depends on whether a log-probability is a sum or a mean over dimensions: with means, ratios stay
    within about 1e-3 of 1.
    """
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def clip_mask(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return a mask (E,) of edges that the clip stops: their gradient is zero."""
    return torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low) & (advantage != 0)


def path_bounds(
    position: Tensor, clip_range: float | list[float], *, power: float, dual: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds of a path's log ratio after `position` steps: low, high and dual clip, shaped as `position`.

    CTPO (arXiv 2605.07331): with t = `position`, bounds grow as t^power, because the standard deviation of a sum of t
    independent terms grows as t^0.5. The dual clip is `dual` x the upper bound; None means infinity.
    """
    low, high = both_bounds(clip_range)
    width = position**power
    return low * width, high * width, (math.inf if dual is None else dual) * high * width


def path_clip_loss(log_ratio: Tensor, advantage: Tensor, bounds: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return PPO's loss with a clip of log r and, where A < 0, a dual clip (arXiv 1912.09729); see `path_bounds`.

    The loss is max(-A r, -A clip(r)), and at most |A| exp(dual) where A < 0. Both are computed as one clip of log r per
    sign of A.
    """
    low, high, dual = bounds
    return -advantage * bounded_exp(torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio.clamp(-low, dual)))


def path_clip_mask(log_ratio: Tensor, advantage: Tensor, bounds: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return a mask of the edges that `path_clip_loss` clips: their gradient is zero."""
    low, high, dual = bounds
    bad = (log_ratio < -low) | (log_ratio > dual)
    return torch.where(advantage > 0, log_ratio > high, bad) & (advantage != 0)


def soft_gate_loss(ratio: Tensor, advantage: Tensor, positive: float, negative: float) -> Tensor:
    """Return SAPO's loss (arXiv 2511.20347): -A f(r), f(r) = 4 / t sigmoid(t (r - 1)), t by the sign of A.

    t is the temperature `positive` or `negative`. The gradient is that of -A r times sech^2(t (r - 1) / 2). So it is
    full at r = 1, and fades where PPO would clip. 1 / t plays the role of PPO's clip range, so a good t, too, depends on
    whether log-probabilities are sums or means.
    """
    temperature = torch.where(advantage > 0, positive, negative)
    return -advantage * 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
