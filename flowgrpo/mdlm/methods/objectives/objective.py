"""Objectives: losses of the estimated log-probabilities of answers.

An objective takes l of every view (n, B, L), new, old and of the reference, and sums a loss over rows, with the weights of
`aggregation` for a mean. A `separable` one is a sum over views too, and may be computed for some of them at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.schema.base import Choice, Positive, Rate, Strict
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.clipped_ratio import (
    LIMIT,
    both_bounds,
    bounded_exp,
    clip_loss,
    clip_mask,
    soft_gate_loss,
)

Pair = Annotated[list[Positive], Field(min_length=2, max_length=2)]


@dataclass(frozen=True, kw_only=True)
class GivenInputs:
    """Inputs of a loss for B answers in n views, before the policy computes its log-probabilities."""

    # (n, B, L) log p, under the policy that made the answers, of the tokens each view scores, 0 elsewhere; None for the
    # present policy.
    old: Tensor | None
    reference: Tensor | None  # the same under the reference, or None
    weight: Tensor  # (n, B, L), of `Views`
    view_weight: Tensor  # (n,), of `Views`
    length: Tensor  # (B,) scored tokens
    advantage: Tensor  # (B,)
    token_weight: Tensor  # (B, L) of the aggregation
    active_views: Tensor  # (n, B) bool, views of each answer that the loss includes
    order: Tensor  # (B, L) int64 step that wrote each token, `Views.first`, if the views follow the steps

    def of(self, rows: Tensor) -> GivenInputs:
        """Select rows (int64)."""
        return GivenInputs(
            old=None if self.old is None else self.old[:, rows],
            reference=None if self.reference is None else self.reference[:, rows],
            weight=self.weight[:, rows],
            view_weight=self.view_weight,
            length=self.length[rows],
            advantage=self.advantage[rows],
            token_weight=self.token_weight[rows],
            active_views=self.active_views[:, rows],
            order=self.order[rows],
        )

    def at(self, new: Tensor, active_views: Tensor) -> LossInputs:
        """Add the log-probabilities of the policy, for some of the views."""
        old = new.detach() if self.old is None else self.old
        return LossInputs(**{**vars(self), "new": new, "old": old, "active_views": active_views})


@dataclass(frozen=True, kw_only=True)
class LossInputs(GivenInputs):
    """Inputs of a loss for B answers in n views; gradients flow through `new`."""

    new: Tensor  # (n, B, L) log p of the tokens each view scores, 0 elsewhere
    old: Tensor  # the same under the policy that made the answers

    @property
    def active_weight(self) -> Tensor:
        """(n, B, L) weights, 0 outside the active views."""
        return self.weight * self.active_views[:, :, None]

    @property
    def row_weight(self) -> Tensor:
        """Weight (B,) of whole answers."""
        return self.token_weight.sum(1)

    def gap(self, other: Tensor) -> Tensor:
        """Return the weighted new - other (n, B, L); its sum over views and tokens is the gap of the estimates."""
        return self.active_weight * (self.new - other)


KL: dict[str, Callable[[Tensor], Tensor]] = {  # of d = new - other, on samples of the policy
    "k1": lambda gap: gap,  # unbiased; its mean gradient is 0: it only measures
    "k2": lambda gap: gap.square() / 2,  # biased as a value, but its gradient is that of the KL
    # Unbiased, never negative: e^-d - 1 + d. Useless for |d| of tens of nats, as of whole answers.
    "k3": lambda gap: torch.expm1((-gap).clamp(max=LIMIT)) + gap,
}


class Divergence(Strict):
    """A pull to the reference, or to the policy that made the answers."""

    form: Literal["k1", "k2", "k3"] = "k3"
    """k1 only measures; k2 has the gradient of the KL; k3 is unbiased and never negative."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL in the loss; 0 computes none."""
    level: Literal["token", "sequence"] = "token"
    """token: of each token; sequence: of the answer's gap, over its length (ESPO's k2)."""
    target: Literal["reference", "base", "old"] = "reference"
    """reference: the start of training, with the adapters of model.lora.path; base: the model without adapters; old: the
    policy that made the answers (TraceRL)."""

    @property
    def reference(self) -> str | None:
        """The reference of the KL in the words of `Weights`: `fixed`, `base`, or None if none is computed."""
        return {"reference": "fixed", "base": "base"}.get(self.target) if self.beta > 0 else None

    def loss(self, inputs: LossInputs) -> Tensor | float:
        """Return the term of the loss, beta times the mean KL; 0 without a beta."""
        return self.beta * self.mean(inputs) if self.beta > 0 else 0.0

    def mean(self, inputs: LossInputs) -> Tensor:
        """Return the KL weighted over tokens or answers."""
        other = inputs.old if self.target == "old" else inputs.reference
        assert other is not None, "no reference was computed"
        gap = inputs.gap(other)
        if self.level == "token":
            return (inputs.token_weight * KL[self.form](gap.sum(0))).sum()
        return (inputs.row_weight * KL[self.form](gap.sum((0, 2))) / inputs.length.clamp(min=1)).sum()


class Objective(Choice):
    """A loss with a divergence `kl`."""

    if TYPE_CHECKING:  # a field of some, and of others a property

        @property
        @abstractmethod
        def kl(self) -> Divergence:
            """The pull to the reference, or to the policy that made the answers."""

    def separable(self, views: Views) -> bool:
        """Return whether the loss is a sum over views, so that it may be computed for some of them at a time."""
        return False

    @abstractmethod
    def loss(self, inputs: LossInputs) -> Tensor:
        """Return the loss, a number."""

    @abstractmethod
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """Return how far the policy has moved: log ratios of tokens (B, L) or of answers (B,)."""

    @abstractmethod
    def stopped(self, inputs: LossInputs) -> Tensor:
        """Return which ratios have no gradient, bool in the shape of `log_ratio`."""

    def above(self, inputs: LossInputs) -> Tensor:
        """Return whether the ratios of `stopped` are above 1, bool in the same shape."""
        return self.log_ratio(inputs) > 0


class Ratio(Objective):
    """An objective of ratios."""

    clip_range: Positive | Pair = 0.2
    """How far a ratio may be from 1: one bound for both sides, or [low, high]."""
    dual: Positive | None = None
    """The loss of a bad answer is at most this times |A| (arXiv 1912.09729); null: no such bound."""
    gate: Pair | None = None
    """Temperatures for A > 0 and A <= 0 of SAPO's soft gate (arXiv 2511.20347), in place of the clip; null: clip."""
    kl: Divergence = Divergence()
    """A pull to the reference, or to the policy that made the answers."""

    def ratio_loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of each ratio, in its shape."""
        if self.gate is not None:
            return soft_gate_loss(ratio, advantage, *self.gate)
        loss = clip_loss(ratio, advantage, *both_bounds(self.clip_range))
        if self.dual is None:
            return loss
        # Of bad answers at most dual |A| (arXiv 1912.09729).
        return torch.where(advantage < 0, torch.minimum(loss, -self.dual * advantage), loss)

    def ratio_stopped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return which ratios have no gradient, bool: none with the gate."""
        if self.gate is not None:
            return torch.zeros(ratio.shape, dtype=torch.bool, device=ratio.device)
        stopped = clip_mask(ratio, advantage, *both_bounds(self.clip_range))
        return stopped if self.dual is None else stopped | ((advantage < 0) & (ratio > self.dual))

    def ratio(self, inputs: LossInputs) -> Tensor:
        """Return the ratios, in the shape of `log_ratio`."""
        return bounded_exp(self.log_ratio(inputs))


class TokenRatio(Ratio):
    """A ratio for each token, of its log-probability summed over the views that score it (diffu-GRPO, CJ-GRPO, ...)."""

    name: Literal["token_ratio"] = "token_ratio"

    @override
    def separable(self, views: Views) -> bool:
        return views.disjoint and (self.kl.beta == 0 or self.kl.level == "token")

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        weight = inputs.token_weight * (inputs.active_weight > 0).any(0)
        return (weight * self.ratio_loss(self.ratio(inputs), inputs.advantage[:, None])).sum() + self.kl.loss(inputs)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.gap(inputs.old).sum(0)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        stopped = self.ratio_stopped(self.ratio(inputs), inputs.advantage[:, None])
        return stopped & (inputs.active_weight > 0).any(0)


def sequence_log_ratio(inputs: LossInputs, normalised: bool = True) -> Tensor:
    """Return the gap (B,) of the estimates of whole answers; with `normalised` over the length."""
    gap = inputs.gap(inputs.old).sum((0, 2))
    return gap / inputs.length.clamp(min=1) if normalised else gap


class SequenceRatio(Ratio):
    """One ratio for each answer, of the whole estimate (GDPO).

    Differences of ELBOs are nats of a whole answer: unnormalised, the first small step exceeds a clip of 0.2. GDPO divides
    the clipped loss by the length instead of the exponent; where nothing has moved that is the same gradient.
    """

    name: Literal["sequence_ratio"] = "sequence_ratio"
    normalised: bool = True
    """Take the estimate over the answer's length (GSPO, ESPO)."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        loss = inputs.row_weight * self.ratio_loss(self.ratio(inputs), inputs.advantage)
        return loss.sum() + self.kl.loss(inputs)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return sequence_log_ratio(inputs, self.normalised)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        return self.ratio_stopped(self.ratio(inputs), inputs.advantage)


class Bound(Objective):
    """An objective that bounds a likelihood: no divergence, and no answer without gradient."""

    @property
    def kl(self) -> Divergence:
        """A divergence of weight 0."""
        return Divergence()

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        return torch.zeros_like(inputs.advantage, dtype=torch.bool)


class LinearBound(Bound):
    """BGPO (arXiv 2510.11683): a lower bound of A exp(mean of d_j) that is a sum over the views j.

    A >= 0: w_j A (1 + d_j), for e^x >= 1 + x; A < 0: w_j A e^(d_j), for exp is convex. d_j is the gap of view j's own
    estimate (its contribution over its weight w_j). Equal to A exp(...) in value and gradient where nothing has moved. The
    DARE code forms 1 + d as exp(log(1 + d)), which is NaN for d <= -1, and clips; we do neither.
    """

    name: Literal["linear_bound"] = "linear_bound"
    normalised: bool = True
    """Take each view's gap over the answer's length, as the DARE code."""

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
    """SPG (arXiv 2510.09541): raises a lower bound of good answers, lowers an upper bound of bad ones; no ratio, no KL.

    A > 0: the ELBO per token. A <= 0: mix times the upper bound (1 / beta) log sum_j w_ij p_ij^beta, mean over the tokens
    that some view scores, and 1 - mix times the ELBO per token. The weights w of the views replace the paper's 1[masked] /
    t over the number of views, which is what `likelihood.blocks` weighs. In the mean over masks the bound holds for beta >=
    L (Hoelder); for the paper's smaller ones it lacks a constant. Old log-probabilities play no part.
    """

    name: Literal["sandwich"] = "sandwich"
    beta: Positive = 1.5
    """Exponent of the upper bound."""
    mix: Rate = 0.5
    """Share of the upper bound in the loss of bad answers; the rest is the ELBO's."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        lower, upper = self.bounds(inputs)
        chosen = torch.where(inputs.advantage > 0, lower, self.mix * upper + (1 - self.mix) * lower)
        return -(inputs.row_weight * inputs.advantage * chosen).sum()

    def bounds(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper bound (B,) per token of each answer."""
        weight = inputs.active_weight
        lower = (weight * inputs.new).sum((0, 2)) / inputs.length.clamp(min=1)
        scored = (weight > 0).any(0)  # (B, L)
        powers = (weight.log() + self.beta * inputs.new).where(scored, 0.0)
        upper = torch.logsumexp(powers, 0) / self.beta * scored
        return lower, upper.sum(1) / scored.sum(1).clamp(min=1)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """Return the log ratio (B,) of the lower bound per token; the loss does not use it."""
        return sequence_log_ratio(inputs)
