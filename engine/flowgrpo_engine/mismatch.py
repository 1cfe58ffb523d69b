"""Mismatch between an engine and the trained policy: metrics, and the importance weights that correct for it.

The ratio of the update compares the policy with itself at the rollout (old), as without an engine. But the samples come
from another policy, the engine's. So each action has the weight min(exp(log p_old - log p_engine), C), without gradient:
truncated importance sampling (Espeholt et al., arXiv 1802.01561; for language models verl's rollout correction).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FAR = 0.01  # nats; a larger mean absolute log-ratio gives a warning

NAMES = tuple(
    f"engine/{name}"
    for name in (
        "mean_abs_log_ratio",
        "max_abs_log_ratio",
        "kl",
        "kl_joint",
        "effective_samples",
        "effective_samples_joint",
        "mean_weight",
        "truncated_fraction",
    )
)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Differences log p_old - log p_engine of a process's trained actions: steps of a flow, tokens of a text.

    Attributes:
        each: (E,) difference of each action; for a step of a flow, the mean over its dimensions.
        joint: (R,) difference of each whole sample.
        weights: (E,) truncated weight of each action.
        truncated: number of truncated weights.
    """

    each: torch.Tensor
    joint: torch.Tensor
    weights: torch.Tensor
    truncated: int


def clip_weights(gap: torch.Tensor, most: float) -> torch.Tensor:
    """Return the weights min(exp(gap), most) of differences of log-probabilities."""
    return gap.clamp(max=math.log(most)).exp()


def metrics(everyone: Sequence[Mismatch]) -> dict[str, float | None]:
    """Return the metrics of the mismatch over all processes; all are None if no action has a finite difference.

    `engine/kl` estimates the divergence of the trained policy from the engine by the mean of log p_engine - log p_old, in
    nats per action; `engine/kl_joint` does so in nats per sample. `engine/effective_samples` is Kish's effective sample size
    of actions with untruncated ratios as weights, as a share of their number; `engine/effective_samples_joint` is that of
    whole samples.
    """
    gaps = torch.cat([each.each for each in everyone])
    joint = torch.cat([each.joint for each in everyone])
    weights = torch.cat([each.weights for each in everyone])
    if not len(gaps):
        return dict.fromkeys(NAMES)
    values: tuple[torch.Tensor | float, ...] = (
        gaps.abs().mean(),
        gaps.abs().max(),
        -gaps.mean(),
        -joint.mean(),
        effective(gaps),
        effective(joint),
        weights.mean(),
        sum(each.truncated for each in everyone) / len(weights),
    )
    return dict(zip(NAMES, map(float, values), strict=True))


def effective(log_weights: torch.Tensor) -> float:
    """Return the effective sample size of weights, given as logarithms (n,), as a share of n: from 1 / n to 1."""
    total, squares = log_weights.logsumexp(0), (2 * log_weights).logsumexp(0)
    return float((2 * total - squares).exp()) / len(log_weights)
