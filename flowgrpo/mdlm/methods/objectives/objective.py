"""How the policy moves: losses of estimated log-probabilities of answers.

An objective sees l of every view (n, B, L), new, old and of the reference, and sums a loss over rows, with the weights
of `aggregation` for a mean. Where it is a sum over views too it is `separable`, and may be computed for some of them at a
time.
"""

from __future__ import annotations

from abc import abstractmethod
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
    clipped,
    soft_gate_loss,
)

Pair = Annotated[list[Positive], Field(min_length=2, max_length=2)]


@dataclass(frozen=True, kw_only=True)
class GivenInputs:
    """What is known of B answers in n views before the policy is asked for their log-probabilities.

    Attributes:
        old: (n, B, L) log p, under the policy that made the answers, of the tokens each view scores, 0 elsewhere; None for
            the present policy.
        reference: the same under the reference, or None.
        weight: (n, B, L), of `Views`.
        view_weight: (n,), of `Views`.
        length: (B,) scored tokens.
        advantage: (B,)
        token_weight: (B, L) of the aggregation.
        active_views: (n, B) bool, which views of each answer the loss is of.
        order: (B, L) int64, the step at which each token was written, `Views.first`, where views follow the steps.
    """

    old: Tensor | None
    reference: Tensor | None
    weight: Tensor
    view_weight: Tensor
    length: Tensor
    advantage: Tensor
    token_weight: Tensor
    active_views: Tensor
    order: Tensor

    def of(self, rows: Tensor) -> GivenInputs:
        """The inputs of some rows, int64."""
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
        """The inputs where the policy has come to, for some of the views."""
        old = new.detach() if self.old is None else self.old
        return LossInputs(**{**vars(self), "new": new, "old": old, "active_views": active_views})


@dataclass(frozen=True, kw_only=True)
class LossInputs(GivenInputs):
    """What an objective sees of B answers in n views; gradients come through `new`.

    Attributes:
        new: (n, B, L) log p of the tokens each view scores, 0 elsewhere.
        old: the same under the policy that made the answers.
    """

    new: Tensor
    old: Tensor

    @property
    def active_weight(self) -> Tensor:
        """(n, B, L) weights, 0 outside the active views."""
        return self.weight * self.active_views[:, :, None]

    @property
    def row_weight(self) -> Tensor:
        """The weight (B,) of whole answers."""
        return self.token_weight.sum(1)

    def gap(self, other: Tensor) -> Tensor:
        """(n, B, L): weighted new - other, of which the sum over views and tokens is the gap of estimates."""
        return self.active_weight * (self.new - other)


def k1(gap: Tensor) -> Tensor:
    """KL from samples of the policy, d = new - other: d. Unbiased; its gradient is 0 in the mean, it only measures."""
    return gap


def k2(gap: Tensor) -> Tensor:
    """d^2 / 2: biased as a value, but on samples of the policy its gradient is that of the KL."""
    return gap.square() / 2


def k3(gap: Tensor) -> Tensor:
    """e^-d - 1 + d: unbiased, never negative. Useless where |d| is tens of nats, as it is for whole answers."""
    return torch.expm1((-gap).clamp(max=LIMIT)) + gap


KL = {"k1": k1, "k2": k2, "k3": k3}


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
        """Which reference the KL is from, as `Weights` calls it: `fixed`, `base`, or None where none is computed."""
        return {"reference": "fixed", "base": "base"}.get(self.target) if self.beta > 0 else None

    def loss(self, inputs: LossInputs) -> Tensor:
        """The term that is added to the loss, beta KL, a number."""
        return self.beta * self.mean(inputs)

    def mean(self, inputs: LossInputs) -> Tensor:
        """KL weighted over tokens or answers, a number."""
        other = inputs.old if self.target == "old" else inputs.reference
        assert other is not None, "no reference was computed"
        gap = inputs.gap(other)
        if self.level == "token":
            return (inputs.token_weight * KL[self.form](gap.sum(0))).sum()
        return (inputs.row_weight * KL[self.form](gap.sum((0, 2))) / inputs.length.clamp(min=1)).sum()


class Objective(Choice):
    """What every objective has, beside its divergence `kl`."""

    if TYPE_CHECKING:  # a field of some, and of others a property

        @property
        @abstractmethod
        def kl(self) -> Divergence:
            """A pull to the reference, or to the policy that made the answers."""

    @abstractmethod
    def separable(self, views: Views) -> bool:
        """Whether it is a sum over views, so that it may be computed for some of them at a time."""

    @abstractmethod
    def loss(self, inputs: LossInputs) -> Tensor:
        """The loss, a number."""

    @abstractmethod
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """How far the policy has moved: log ratios of tokens (B, L) or of answers (B,)."""

    @abstractmethod
    def stopped(self, inputs: LossInputs) -> Tensor:
        """Which of the ratios have no gradient, bool in the shape of `log_ratio`."""

    def above(self, inputs: LossInputs) -> Tensor:
        """Whether the ratios that `stopped` looks at are above 1, bool in the same shape."""
        return self.log_ratio(inputs) > 0


def dual_clip_loss(ratio: Tensor, advantage: Tensor, *, low: float, high: float, dual: float) -> Tensor:
    """PPO's loss of each ratio; of bad answers at most dual |A| (arXiv 1912.09729)."""
    loss = clip_loss(ratio, advantage, low, high)
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


class Ratio(Objective):
    """Options of objectives of a ratio."""

    clip_range: Positive | Pair = 0.2
    """How far a ratio may be from 1: one bound for both sides, or [low, high]."""
    dual: Positive | None = None
    """The loss of a bad answer is at most this times |A| (arXiv 1912.09729); null: no such bound."""
    gate: Pair | None = None
    """Temperatures for A > 0 and A <= 0 of SAPO's soft gate (arXiv 2511.20347), in place of the clip; null: clip."""
    kl: Divergence = Divergence()
    """A pull to the reference, or to the policy that made the answers."""

    @property
    def _range(self) -> tuple[float, float]:
        return both_bounds(self.clip_range)

    def ratio_loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """The loss of each ratio, in its shape."""
        if self.gate is not None:
            return soft_gate_loss(ratio, advantage, *self.gate)
        if self.dual is not None:
            low, high = self._range
            return dual_clip_loss(ratio, advantage, low=low, high=high, dual=self.dual)
        return clip_loss(ratio, advantage, *self._range)

    def ratio_stopped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Which ratios have no gradient, bool: none by the gate."""
        if self.gate is not None:
            return torch.zeros(ratio.shape, dtype=torch.bool, device=ratio.device)
        stopped = clipped(ratio, advantage, *self._range)
        return stopped if self.dual is None else stopped | ((advantage < 0) & (ratio > self.dual))


class TokenRatio(Ratio):
    """A ratio for each token, of its log-probability summed over the views that score it (diffu-GRPO, CJ-GRPO, ...)."""

    name: Literal["token_ratio"] = "token_ratio"

    @override
    def separable(self, views: Views) -> bool:
        return views.disjoint and (self.kl.beta == 0 or self.kl.level == "token")

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        weight = inputs.token_weight * (inputs.active_weight > 0).any(0)
        loss = (weight * self.ratio_loss(self.ratio(inputs), inputs.advantage[:, None])).sum()
        return loss if self.kl.beta == 0 else loss + self.kl.loss(inputs)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """The log ratio (B, L) of each token."""
        return inputs.gap(inputs.old).sum(0)

    def ratio(self, inputs: LossInputs) -> Tensor:
        """The ratio (B, L) of each token."""
        return bounded_exp(self.log_ratio(inputs))

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        """Which scored tokens have no gradient, (B, L) bool."""
        stopped = self.ratio_stopped(self.ratio(inputs), inputs.advantage[:, None])
        return stopped & (inputs.active_weight > 0).any(0)


def sequence_log_ratio(inputs: LossInputs, normalised: bool = True) -> Tensor:
    """(B,) gap of the estimates of whole answers; with `normalised` over the length."""
    gap = inputs.gap(inputs.old).sum((0, 2))
    return gap / inputs.length.clamp(min=1) if normalised else gap


class SequenceRatio(Ratio):
    """One ratio for each answer, of the whole estimate (GDPO).

    Differences of ELBOs are nats of a whole answer: unnormalised, a clip of 0.2 is met by the first small step. GDPO divides
    the clipped loss by the length instead of the exponent; where nothing has moved that is the same gradient.
    """

    name: Literal["sequence_ratio"] = "sequence_ratio"
    normalised: bool = True
    """Take the estimate over the answer's length (GSPO, ESPO)."""

    @override
    def separable(self, views: Views) -> bool:
        """False: exp of a sum is not a sum."""
        return False

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        loss = (inputs.row_weight * self.ratio_loss(self.ratio(inputs), inputs.advantage)).sum()
        return loss if self.kl.beta == 0 else loss + self.kl.loss(inputs)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """The log ratio (B,) of each answer."""
        return sequence_log_ratio(inputs, self.normalised)

    def ratio(self, inputs: LossInputs) -> Tensor:
        """The ratio (B,) of each answer."""
        return bounded_exp(self.log_ratio(inputs))

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        return self.ratio_stopped(self.ratio(inputs), inputs.advantage)


class Bound(Objective):
    """What objectives that bound a likelihood have in common: no divergence, and no answer without gradient."""

    @property
    def kl(self) -> Divergence:
        """A divergence of weight 0: it has none."""
        return Divergence()

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        """None of the answers (B,)."""
        return torch.zeros_like(inputs.advantage, dtype=torch.bool)


class LinearBound(Bound):
    """BGPO (arXiv 2510.11683): a lower bound of A exp(mean of d_j) that is a sum over the views j.

    A >= 0: w_j A (1 + d_j), for e^x >= 1 + x; A < 0: w_j A e^(d_j), for exp is convex. d_j is the gap of view j's own
    estimate (what it adds over its weight w_j). Equal to A exp(...) in value and gradient where nothing has moved. The DARE
    code forms 1 + d as exp(log(1 + d)), which is NaN for d <= -1, and clips; we do neither.
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
        """The log ratio (B,) of the objective that it bounds."""
        return sequence_log_ratio(inputs, self.normalised)


class Sandwich(Bound):
    """SPG (arXiv 2510.09541): raises a lower bound of good answers, lowers an upper bound of bad ones; no ratio, no KL.

    A > 0: the ELBO per token. A <= 0: mix times the upper bound (1 / beta) log sum_j w_ij p_ij^beta, mean over the tokens
    that some view scores, and 1 - mix times the ELBO per token. The weights w of the views stand where the paper has
    1[masked] / t over the number of views, which is what `likelihood.blocks` weighs. In the mean over masks the bound holds
    for beta >= L (Hoelder); for the paper's smaller ones it lacks a constant. Old log-probabilities play no part.
    """

    name: Literal["sandwich"] = "sandwich"
    beta: Positive = 1.5
    """Exponent of the upper bound."""
    mix: Rate = 0.5
    """Share of the upper bound in the loss of bad answers; the rest is the ELBO's."""

    @override
    def separable(self, views: Views) -> bool:
        """False: the log of a sum is not a sum."""
        return False

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        lower, upper = self.bounds(inputs)
        chosen = torch.where(inputs.advantage > 0, lower, self.mix * upper + (1 - self.mix) * lower)
        return -(inputs.row_weight * inputs.advantage * chosen).sum()

    def bounds(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """The lower and the upper bound (B,) per token of each answer."""
        weight = inputs.active_weight
        lower = (weight * inputs.new).sum((0, 2)) / inputs.length.clamp(min=1)
        seen = (weight > 0).any(0)  # (B, L)
        powers = (weight.log() + self.beta * inputs.new).where(seen, 0.0)
        upper = torch.logsumexp(powers, 0) / self.beta * seen
        return lower, upper.sum(1) / seen.sum(1).clamp(min=1)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """The log ratio (B,) of the lower bound per token; the loss does not use it."""
        return sequence_log_ratio(inputs)
