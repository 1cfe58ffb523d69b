"""Objectives that bound a likelihood from below or above."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.methods.objectives.objective import (
    Divergence,
    LossInputs,
    Objective,
    sequence_log_prob,
    sequence_log_ratio,
)
from flowgrpo.schema.base import Positive, Rate
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.clipped_ratio import LIMIT


class Bound(Objective):
    """An objective that bounds a likelihood: no KL term, and no clip, so that every answer has a gradient."""

    @property
    def kl(self) -> Divergence:
        """A KL term of weight 0."""
        return Divergence()

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        return torch.zeros_like(inputs.advantage, dtype=torch.bool)


class LinearBound(Bound):
    """BGPO (arXiv 2510.11683): a lower bound of A exp(mean of d_j) that is a sum over the views j.

    A >= 0: w_j A (1 + d_j), because e^x >= 1 + x; A < 0: w_j A e^(d_j), because exp is convex. d_j is new - old of view j's
    own estimate (its contribution divided by its weight w_j). While the policy has not moved, value and gradient equal those
    of A exp(...). The DARE code computes 1 + d as exp(log(1 + d)), which is NaN for d <= -1, and clips; we do neither.
    """

    name: Literal["linear_bound"] = "linear_bound"
    normalised: bool = True
    """Divide each view's log ratio by the answer's length, as the DARE code does."""

    @override
    def separable(self, views: Views) -> bool:
        return True

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        gap = inputs.gap(inputs.old).sum(2) / inputs.view_weight[:, None]  # (n, B)
        gap = gap / inputs.length.clamp(min=1) if self.normalised else gap
        bound = torch.where(inputs.advantage < 0, torch.exp(gap.clamp(max=LIMIT)), 1 + gap)
        return -(inputs.row_weight * inputs.advantage * inputs.view_weight[:, None] * bound * inputs.active_views).sum()

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return sequence_log_ratio(inputs, self.normalised)


class Sandwich(Bound):
    """SPG (arXiv 2510.09541): raise a lower bound of good answers, lower an upper bound of bad ones; no ratio, no KL.

    A > 0: the ELBO per token. A <= 0: mix times the upper bound (1 / beta) log sum_j w_ij p_ij^beta (a mean over the tokens
    that some view scores), plus 1 - mix times the ELBO per token. The views' weights w stand in place of the paper's
    1[masked] / t, divided by the number of views; `likelihood.blocks` has these weights. In the mean over masks the bound
    holds for beta >= L (Hoelder); for the paper's smaller beta it lacks a constant. Old log-probabilities are not used.
    """

    name: Literal["sandwich"] = "sandwich"
    beta: Positive = 1.5
    """Exponent of the upper bound."""
    mix: Rate = 0.5
    """Share of the upper bound in the loss of bad answers; the rest is the share of the ELBO."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        lower, upper = self.bounds(inputs)
        chosen = torch.where(inputs.advantage > 0, lower, self.mix * upper + (1 - self.mix) * lower)
        return -(inputs.row_weight * inputs.advantage * chosen).sum()

    def bounds(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper bound (B,) per token of each answer."""
        weight = inputs.active_weight
        lower = sequence_log_prob(inputs, inputs.new)
        scored = (weight > 0).any(0)  # (B, L)
        powers = (weight.log() + self.beta * inputs.new).where(scored, 0.0)
        upper = torch.logsumexp(powers, 0) / self.beta * scored
        return lower, upper.sum(1) / scored.sum(1).clamp(min=1)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """Return the log ratio (B,) of the lower bound per token; the loss does not use it."""
        return sequence_log_ratio(inputs)
