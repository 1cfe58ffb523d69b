"""The correction of tokens that an engine drew; what it is, and what is told: `flowgrpo_engine.mismatch`.

A token weighs min(p_old / p_engine, C), both where it was committed. An objective of whole answers weighs an answer by the
mean of its tokens' weights.
"""

from __future__ import annotations

import math

import torch

from flowgrpo_engine.mismatch import Mismatch, truncated

Tensor = torch.Tensor


def token_weights(old: Tensor, engine: Tensor, truncate: float) -> Tensor:
    """Weights (B, L) of tokens, float64; 1 for those that the engine did not draw.

    Args:
        old: (B, L) log-probability of each token under the trained policy, where it was committed.
        engine: the same under the engine, NaN where there is none.
        truncate: C, the largest weight.
    """
    return truncated((old - engine).where(engine.isfinite(), 0.0), truncate)


def mismatch(old: Tensor, engine: Tensor, scored: Tensor, truncate: float) -> Mismatch:
    """How far the trained policy is from the engine, by tokens whose log-probabilities are finite, in nats per token.

    Args:
        old, engine, truncate: as of `token_weights`.
        scored: (B, L) bool, the tokens that are trained on.
    """
    gap = (old - engine).double().cpu()
    known = gap.isfinite() & scored.cpu()
    return Mismatch(
        each=gap[known],
        joint=gap.where(known, 0.0).sum(1),
        weights=truncated(gap[known], truncate),
        truncated=int((gap[known] > math.log(truncate)).sum()),
    )
