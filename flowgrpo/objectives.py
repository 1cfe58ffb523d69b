"""How the policy moves: the loss of an edge, and the divergence from the reference that is added to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samplers.kernels import State

Tensor = torch.Tensor


@dataclass(frozen=True)
class Terms:
    """What an objective sees of E edges of one evaluation; gradients come through `log_prob`, `mean` and `velocity`.

    Attributes:
        log_prob: (E,) of the stored next state under the policy as it is.
        old_log_prob: (E,) as the rollout recorded it.
        advantage: (E,)
        mean, std: of the step; tensors (E, ...), and one number.
        step_size: sigma - sigma_next, positive.
        velocity: tensors (E, ...).
        reference_mean, reference_velocity: the same under the reference; None without a divergence.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    mean: State
    std: Tensor
    step_size: float
    velocity: State
    reference_mean: State | None = None
    reference_velocity: State | None = None


def clipped_ratio(terms: Terms, low: float, high: float) -> Tensor:
    """PPO's loss (E,): max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(log_prob - old_log_prob).

    Clip ranges belong to a form of log-probability: averaged over D dimensions, ratios stay within about 1e-3 of 1.
    """
    ratio = torch.exp(terms.log_prob - terms.old_log_prob)
    return torch.maximum(-terms.advantage * ratio, -terms.advantage * ratio.clamp(1 - low, 1 + high))


def clipped(terms: Terms, low: float, high: float) -> Tensor:
    """Which edges (E,) the clip stops: their gradient is zero."""
    ratio = torch.exp(terms.log_prob - terms.old_log_prob)
    return torch.where(terms.advantage > 0, ratio > 1 + high, ratio < 1 - low) & (terms.advantage != 0)


def exact_kl(terms: Terms) -> Tensor:
    """KL (E,) of the step's Gaussian from the reference's, averaged over dimensions: mean (mu - mu_ref)^2 / (2 std^2)."""
    return _mean_square(terms.mean, terms.reference_mean) / (2 * terms.std**2)


def flow_grpo_kl(terms: Terms) -> Tensor:
    """Flow-GRPO's form (E,): the exact one without the step in std, mean (mu - mu_ref)^2 / (2 g^2), std = g sqrt(h)."""
    return _mean_square(terms.mean, terms.reference_mean) * terms.step_size / (2 * terms.std**2)


def velocity_kl(terms: Terms) -> Tensor:
    """Squared distance (E,) of the velocities, averaged over dimensions; knows nothing of the kernel."""
    return _mean_square(terms.velocity, terms.reference_velocity)


KL = {"exact": exact_kl, "flow_grpo": flow_grpo_kl, "velocity": velocity_kl}


def _mean_square(a: State, b: State) -> Tensor:
    return torch.cat([(x.float() - y.float()).flatten(1) for x, y in zip(a, b, strict=True)], dim=1).square().mean(1)
