"""Losses on probability ratios, for flow models and language models: surrogates, path clip and soft gate."""

from __future__ import annotations

import math
from typing import Literal

from flowgrpo.schema.imports.heavy import Tensor, torch

Surrogate = Literal["clip", "kept_gradient", "frozen_ratio", "tapered_ratio"]

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


def frozen_loss(weight: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return the loss (E,) of value -A w and gradient -A w grad log p, with the weight w (E,) without gradient.

    The gradient comes from the log ratio itself, so that it does not vanish beyond `LIMIT`.
    """
    return -advantage * weight.detach() * (1 + (log_ratio - log_ratio.detach()))


def kept_gradient_loss(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return GPPO's loss (E,): the values of `clip_loss`, and a gradient of the edges that the clip stops, too.

    GPPO (arXiv 2508.07629): a stopped edge has the gradient -A c grad log p, where c is the bound that stops it: 1 + high
    if A > 0, 1 - low if A < 0. Other edges have PPO's, -A r grad log p; r is at most exp(`LIMIT`). It pulls on without end,
    so add a divergence from the rollout policy.
    """
    ratio = bounded_exp(log_ratio)
    stopped = clip_mask(ratio, advantage, low, high)
    return frozen_loss(torch.where(stopped, ratio.clamp(1 - low, 1 + high), ratio), log_ratio, advantage)


def frozen_ratio_loss(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return CISPO's loss (E,): gradient -A w grad log p, w = clip(r, 1 - low, 1 + high) (arXiv 2506.13585).

    The clip bounds the weights of all edges and stops none; w has no gradient.
    """
    return frozen_loss(bounded_exp(log_ratio).clamp(1 - low, 1 + high), log_ratio, advantage)


def tapered_ratio_loss(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return TOPR's loss (E,): gradient -A w grad log p, w = 1 if A > 0, else min(r, 1) (arXiv 2503.14286).

    Good edges are learnt however unlikely they are. Bad edges lose their weight as they become unlikely. The released
    code splits by the sign of the reward.
    """
    ratio = bounded_exp(log_ratio)
    return frozen_loss(torch.where(advantage > 0, torch.ones_like(ratio), ratio.clamp(max=1)), log_ratio, advantage)


def surrogate_loss(
    surrogate: Surrogate, log_ratio: Tensor, advantage: Tensor, clip_range: float | list[float]
) -> Tensor:
    """Return the loss (E,) of a surrogate, whose value and gradient at r = 1 are those of -A r."""
    low, high = both_bounds(clip_range)
    match surrogate:
        case "clip":
            return clip_loss(bounded_exp(log_ratio), advantage, low, high)
        case "kept_gradient":
            return kept_gradient_loss(log_ratio, advantage, low, high)
        case "frozen_ratio":
            return frozen_ratio_loss(log_ratio, advantage, low, high)
        case "tapered_ratio":
            return tapered_ratio_loss(log_ratio, advantage)


def surrogate_mask(
    surrogate: Surrogate, log_ratio: Tensor, advantage: Tensor, clip_range: float | list[float]
) -> Tensor:
    """Return a mask (E,) of the edges whose gradient a surrogate sets to zero; only `clip` has such edges."""
    stopped = clip_mask(bounded_exp(log_ratio), advantage, *both_bounds(clip_range))
    return stopped if surrogate == "clip" else torch.zeros_like(stopped)


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
