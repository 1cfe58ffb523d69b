"""Means of the ratios of an answer's tokens: Hölder means, and clamps of tokens before the mean."""

from __future__ import annotations

from flowgrpo.schema.imports.heavy import Tensor, torch


def hoelder_log_mean(log_ratio: Tensor, weight: Tensor, power: float) -> Tensor:
    """Return the logarithm (B,) of the Hölder mean of ratios r: M_p = (mean of r^p)^(1 / p), with p = `power`, not 0.

    HölderPO (arXiv 2605.12058), reconstructed: p = 1 is the arithmetic mean, -1 the harmonic one; towards 0 it becomes the
    geometric mean (GSPO). d log M_p / d log r is in proportion to r^p, so a large p pulls most at the largest ratios. The
    mean of `log_ratio` (n, B, L) is over views and tokens, by their `weight` (n, B, L). An answer without weight has 0.
    """
    known = weight > 0
    scaled = power * log_ratio
    top = scaled.detach().where(known, -torch.inf).amax((0, 2), keepdim=True)
    top = top.where(top.isfinite(), 0.0)
    total = weight.sum((0, 2))
    mean = (weight * torch.exp((scaled - top).where(known, 0.0))).sum((0, 2)) / total
    return (mean.where(total > 0, 1.0).log() + top[0, :, 0]) / power


def clamp_tokens(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return log ratios, clamped where they have moved with A: to at most `high` if A > 0, to at least -low if A < 0.

    GMPO (arXiv 2507.20673 and its code) takes the geometric mean of these, and clips no ratio of an answer. A clamped token
    has no gradient; the others of its answer keep theirs. `advantage` can be broadcast to `log_ratio`.
    """
    return torch.where(
        advantage > 0, log_ratio.clamp(max=high), log_ratio.where(advantage == 0, log_ratio.clamp(min=-low))
    )
