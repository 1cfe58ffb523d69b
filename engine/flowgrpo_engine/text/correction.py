"""Truncated importance weights of tokens that an engine sampled; see `flowgrpo_engine.mismatch`.

A token has the weight min(p_old / p_engine, C), with both probabilities at the step that committed it. In an objective of
whole answers, the weight of an answer is the mean of its tokens' weights.
"""

from __future__ import annotations

import math

import torch

from flowgrpo_engine.mismatch import Mismatch, clip_weights

Tensor = torch.Tensor


def token_weights(old: Tensor, engine: Tensor, truncate: float) -> Tensor:
    """Return the weights (B, L) of tokens, float64; 1 for tokens without a log-probability of the engine.

    Args:
        old: (B, L) log-probability of each token under the trained policy, at the step that committed it.
        engine: the same under the engine, NaN where there is none.
        truncate: C, the largest weight.
    """
    return clip_weights((old - engine).where(engine.isfinite(), 0.0), truncate)


def mismatch(old: Tensor, engine: Tensor, scored: Tensor, truncate: float) -> Mismatch:
    """Return the mismatch between the trained policy and the engine over trained tokens with finite log-probabilities.

    Args:
        old, engine, truncate: as of `token_weights`.
        scored: (B, L) bool, the tokens that are trained on.
    """
    gap = (old - engine).double().cpu()
    known = gap.isfinite() & scored.cpu()
    return Mismatch(
        each=gap[known],
        joint=gap.where(known, 0.0).sum(1),
        weights=clip_weights(gap[known], truncate),
        truncated=int((gap[known] > math.log(truncate)).sum()),
    )
