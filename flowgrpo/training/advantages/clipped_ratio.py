"""Losses of a ratio, for both kinds: the clip, the clip of a path's ratio and the soft gate."""

from __future__ import annotations

import math

from flowgrpo.schema.imports.heavy import Tensor, torch

LIMIT = 20.0  # of a log ratio before exp; beyond it there is no gradient


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of log ratios, cut to +-`LIMIT`: an infinite ratio that a clip stops would have the gradient 0 x inf."""
    return torch.exp(log_ratio.clamp(-LIMIT, LIMIT))


def both_bounds(clip_range: float | list[float]) -> tuple[float, float]:
    """The lower and the upper bound of a clip range, which is one number for both or a pair."""
    low, high = clip_range if isinstance(clip_range, list) else (clip_range, clip_range)
    return low, high


def clip_loss(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO's loss (E,): max(-A r, -A clip(r, 1 - low, 1 + high)).

    Clip ranges belong to a form of log-probability: averaged over D dimensions, ratios stay within about 1e-3 of 1.
    """
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Which edges (E,) the clip stops: their gradient is zero."""
    return torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low) & (advantage != 0)


def path_bounds(
    position: Tensor, clip_range: float | list[float], *, power: float, dual: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of the log ratio of a path at its t-th factor, in the shape of `position`: low, high and that of dual clips.

    CTPO (arXiv 2605.07331): all of them are t^power times as wide as at the first, for a sum of t independent terms spreads
    as t^0.5.

    Args:
        position: t, floating.
        dual: multiple of the upper bound; None for no such bound, which is then infinite.
    """
    low, high = both_bounds(clip_range)
    width = position**power
    return low * width, high * width, (math.inf if dual is None else dual) * high * width


def path_clip_loss(log_ratio: Tensor, advantage: Tensor, bounds: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """PPO's loss of a ratio that is clipped in log space, and where A < 0 by a dual clip (arXiv 1912.09729), too.

    max(-A r, -A clip r), and of bad ones at most |A| exp(dual), written as one clip of log r for either sign of A.

    Args:
        bounds: of `path_bounds`.
    """
    low, high, dual = bounds
    return -advantage * bounded_exp(torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio.clamp(-low, dual)))


def path_clipped(log_ratio: Tensor, advantage: Tensor, bounds: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Which ratios that clip stops: their gradient is zero. Arguments as of `path_clip_loss`."""
    low, high, dual = bounds
    bad = (log_ratio < -low) | (log_ratio > dual)
    return torch.where(advantage > 0, log_ratio > high, bad) & (advantage != 0)


def soft_gate_loss(ratio: Tensor, advantage: Tensor, positive: float, negative: float) -> Tensor:
    """SAPO (arXiv 2511.20347): -A f(r) (E,), f(r) = 4 / t sigmoid(t (r - 1)), t `positive` or `negative` as A is.

    Its gradient is that of -A r times sech^2(t (r - 1) / 2): full at r = 1, fading where a clip would cut. Temperatures
    belong to a form of log-probability as clip ranges do; 1 / t plays the range's part.
    """
    temperature = torch.where(advantage > 0, positive, negative)
    return -advantage * 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
