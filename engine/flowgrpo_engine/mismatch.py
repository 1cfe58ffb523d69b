"""What lies between an engine and the trained policy, and how much of it a sample is weighed for.

The update compares the policy with the trained one at the rollout (old), as it does without an engine. That the samples are
another policy's is mended by a weight of each action, min(exp(log p_old - log p_engine), C), without gradient: truncated
importance sampling (Espeholt et al., arXiv 1802.01561; for language models verl's rollout correction).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FAR = 0.01  # nats between engine and trained policy, in the mean, from which a line of metrics has a warning

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
        each: (E,) of one action; of a step of a flow the mean over its dimensions.
        joint: (R,) of whole samples.
        weights: (E,) of the actions, truncated.
        truncated: how many were.
    """

    each: torch.Tensor
    joint: torch.Tensor
    weights: torch.Tensor
    truncated: int


def truncated(gap: torch.Tensor, most: float) -> torch.Tensor:
    """Weights min(exp(gap), most) of differences of log-probabilities."""
    return gap.clamp(max=math.log(most)).exp()


def metrics(everyone: Sequence[Mismatch]) -> dict[str, float | None]:
    """What a line of metrics says of the mismatch on all processes; None where no action has a finite one.

    `engine/kl` estimates the divergence of the trained policy from the engine, in nats per action, by the mean of
    log p_engine - log p_old, and `engine/kl_joint` in nats of a whole sample. `engine/effective_samples` is the effective
    sample size (Kish), as a part of all, of actions weighed by their ratios, untruncated; of
    `engine/effective_samples_joint` of samples weighed by theirs.
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
    """The effective sample size of weights, given by their logarithms, as a part of their number: from 1 / n to 1."""
    total, squares = log_weights.logsumexp(0), (2 * log_weights).logsumexp(0)
    return float((2 * total - squares).exp()) / len(log_weights)
