"""How the policy moves: losses of estimated log-probabilities of answers.

An objective sees l of every view (n, B, L), new, old and of the reference, and sums a loss over rows, with the weights
of `flowgrpo.mdlm.methods.aggregation` for a mean. Where it is a sum over views too it is `separable`, and may be computed
for some of them at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from flowgrpo.schema.lazy import lazy
from flowgrpo.training.surrogate import LIMIT, clip_loss, clipped, soft_gate_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flowgrpo.mdlm.methods.views import Views
else:
    torch = lazy("torch")


@dataclass(frozen=True)
class LossInputs:
    """What an objective sees of B answers in n views; gradients come through `new`.

    Attributes:
        new: (n, B, L) log p of the tokens each view scores, 0 elsewhere; None before they are known.
        old: the same under the policy that made the answers; None for the present one, before `new` is known.
        reference: the same under the reference, or None.
        weight: (n, B, L), of `Views`.
        view_weight: (n,), of `Views`.
        length: (B,) scored tokens.
        advantage: (B,)
        token_weight: (B, L) of the aggregation.
        active_views: (n, B) bool, which views of each answer the loss is of.
    """

    new: Tensor | None
    old: Tensor | None
    reference: Tensor | None
    weight: Tensor
    view_weight: Tensor
    length: Tensor
    advantage: Tensor
    token_weight: Tensor
    active_views: Tensor

    @property
    def active_weight(self) -> Tensor:
        """(n, B, L) weights, 0 outside the active views."""
        return self.weight * self.active_views[:, :, None]

    @property
    def row_weight(self) -> Tensor:
        """(B,) of whole answers."""
        return self.token_weight.sum(1)

    def of(self, rows: Tensor) -> LossInputs:
        """The inputs of some rows, int64, before `new` is known."""
        return LossInputs(
            new=None,
            old=None if self.old is None else self.old[:, rows],
            reference=None if self.reference is None else self.reference[:, rows],
            weight=self.weight[:, rows],
            view_weight=self.view_weight,
            length=self.length[rows],
            advantage=self.advantage[rows],
            token_weight=self.token_weight[rows],
            active_views=self.active_views[:, rows],
        )

    def at(self, new: Tensor, active_views: Tensor) -> LossInputs:
        """The inputs where the policy has come to, for some of the views."""
        return replace(self, new=new, old=new.detach() if self.old is None else self.old, active_views=active_views)

    def gap(self, other: Tensor) -> Tensor:
        """(n, B, L): weighted new - other, of which the sum over views and tokens is the gap of estimates."""
        return self.active_weight * (self.new - other)


class Surrogate(Protocol):
    """A loss of ratios."""

    def loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Loss of each ratio."""

    def stopped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Which ratios have no gradient, bool."""


@dataclass(frozen=True)
class Clip:
    """PPO's clip at 1 - low and 1 + high; with `dual`, the loss of a bad answer is at most dual |A| (arXiv 1912.09729)."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Loss of each ratio."""
        loss = clip_loss(ratio, advantage, self.low, self.high)
        if self.dual is None:
            return loss
        return torch.where(advantage < 0, torch.minimum(loss, -self.dual * advantage), loss)

    def stopped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Which ratios have no gradient, bool."""
        stopped = clipped(ratio, advantage, self.low, self.high)
        return stopped if self.dual is None else stopped | ((advantage < 0) & (ratio > self.dual))


@dataclass(frozen=True)
class SoftGate:
    """SAPO's gate (arXiv 2511.20347) with a temperature for A > 0 and one for the others."""

    positive: float = 1.0
    negative: float = 1.05

    def loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Loss of each ratio."""
        return soft_gate_loss(ratio, advantage, self.positive, self.negative)

    def stopped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Which ratios have no gradient, bool: none."""
        return torch.zeros(ratio.shape, dtype=torch.bool, device=ratio.device)


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


@dataclass(frozen=True)
class Divergence:
    """A pull to another policy: `beta` times a form of KL, per token.

    `token` takes it of each token, `sequence` of the answer's gap, over its length (ESPO's k2). TraceRL pulls to the `old`
    policy, most others to the `reference`.
    """

    beta: float
    form: Literal["k1", "k2", "k3"] = "k3"
    level: Literal["token", "sequence"] = "token"
    target: Literal["reference", "old"] = "reference"

    def loss(self, inputs: LossInputs) -> Tensor:
        """beta KL, a number."""
        return self.beta * self.mean(inputs)

    def mean(self, inputs: LossInputs) -> Tensor:
        """KL weighted over tokens or answers, a number."""
        gap = inputs.gap(inputs.reference if self.target == "reference" else inputs.old)
        if self.level == "token":
            return (inputs.token_weight * KL[self.form](gap.sum(0))).sum()
        return (inputs.row_weight * KL[self.form](gap.sum((0, 2))) / inputs.length.clamp(min=1)).sum()


@dataclass(frozen=True)
class TokenRatio:
    """A ratio for each token, of its log-probability summed over the views that score it (diffu-GRPO, CJ-GRPO, ...)."""

    surrogate: Surrogate
    kl: Divergence | None = None

    def separable(self, views: Views) -> bool:
        """Whether it is a sum over views."""
        return views.disjoint and (self.kl is None or self.kl.level == "token")

    def loss(self, inputs: LossInputs) -> Tensor:
        """Loss, a number."""
        weight = inputs.token_weight * (inputs.active_weight > 0).any(0)
        loss = (weight * self.surrogate.loss(self.ratio(inputs), inputs.advantage[:, None])).sum()
        return loss if self.kl is None else loss + self.kl.loss(inputs)

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """(B, L)"""
        return inputs.gap(inputs.old).sum(0)

    def ratio(self, inputs: LossInputs) -> Tensor:
        """(B, L)"""
        return torch.exp(self.log_ratio(inputs).clamp(-LIMIT, LIMIT))

    def stopped(self, inputs: LossInputs) -> Tensor:
        """Which scored tokens have no gradient, (B, L) bool."""
        return self.surrogate.stopped(self.ratio(inputs), inputs.advantage[:, None]) & (inputs.active_weight > 0).any(0)


@dataclass(frozen=True)
class SequenceRatio:
    """One ratio for each answer, of the whole estimate (GDPO); with `normalised`, of it over the length (GSPO, ESPO).

    Differences of ELBOs are nats of a whole answer: unnormalised, a clip of 0.2 is met by the first small step. GDPO divides
    the clipped loss by the length instead of the exponent; where nothing has moved that is the same gradient.
    """

    surrogate: Surrogate
    normalised: bool = True
    kl: Divergence | None = None

    def separable(self, views: Views) -> bool:
        """Whether it is a sum over views: exp of a sum is none."""
        return False

    def loss(self, inputs: LossInputs) -> Tensor:
        """Loss, a number."""
        loss = (inputs.row_weight * self.surrogate.loss(self.ratio(inputs), inputs.advantage)).sum()
        return loss if self.kl is None else loss + self.kl.loss(inputs)

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """(B,)"""
        gap = inputs.gap(inputs.old).sum((0, 2))
        return gap / inputs.length.clamp(min=1) if self.normalised else gap

    def ratio(self, inputs: LossInputs) -> Tensor:
        """(B,)"""
        return torch.exp(self.log_ratio(inputs).clamp(-LIMIT, LIMIT))

    def stopped(self, inputs: LossInputs) -> Tensor:
        """Which answers have no gradient, (B,) bool."""
        return self.surrogate.stopped(self.ratio(inputs), inputs.advantage)


@dataclass(frozen=True)
class LinearBound:
    """BGPO (arXiv 2510.11683): a lower bound of A exp(mean of d_j) that is a sum over the views j.

    A >= 0: share_j A (1 + d_j), for e^x >= 1 + x; A < 0: share_j A e^(d_j), for exp is convex. d_j is the gap of view j's
    own estimate (its part over its share). Equal to A exp(...) in value and gradient where nothing has moved. The DARE code
    forms 1 + d as exp(log(1 + d)), which is NaN for d <= -1, and clips; we do neither. With `normalised`, d_j is over the
    length, as it is there.
    """

    normalised: bool = True

    def separable(self, views: Views) -> bool:
        """Whether it is a sum over views."""
        return True

    def loss(self, inputs: LossInputs) -> Tensor:
        """Loss, a number."""
        gap = inputs.gap(inputs.old).sum(2) / inputs.view_weight[:, None]  # (n, B)
        gap = gap / inputs.length.clamp(min=1) if self.normalised else gap
        bound = torch.where(inputs.advantage < 0, torch.exp(gap.clamp(max=LIMIT)), 1 + gap)
        return -(inputs.row_weight * inputs.advantage * inputs.view_weight[:, None] * bound * inputs.active_views).sum()

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """(B,) of the objective that it bounds."""
        return SequenceRatio(Clip(), self.normalised).log_ratio(inputs)

    def stopped(self, inputs: LossInputs) -> Tensor:
        """Which answers have no gradient, (B,) bool: none."""
        return torch.zeros_like(inputs.advantage, dtype=torch.bool)


@dataclass(frozen=True)
class Sandwich:
    """SPG (arXiv 2510.09541): raises a lower bound of good answers, lowers an upper bound of bad ones; no ratio, no KL.

    A > 0: the ELBO per token. A <= 0: mix times the upper bound (1 / beta) log sum_j w_ij p_ij^beta, mean over the tokens
    that some view scores, and 1 - mix times the ELBO per token. The weights w of the views stand where the paper has
    1[masked] / t over the number of views, which is what `views.blocks` weighs. In the mean over masks the bound holds for
    beta >= L (Hoelder); for the paper's smaller ones it lacks a constant. Old log-probabilities play no part.
    """

    beta: float = 1.5
    mix: float = 0.5

    def separable(self, views: Views) -> bool:
        """Whether it is a sum over views: the log of a sum is none."""
        return False

    def loss(self, inputs: LossInputs) -> Tensor:
        """Loss, a number."""
        lower, upper = self.bounds(inputs)
        chosen = torch.where(inputs.advantage > 0, lower, self.mix * upper + (1 - self.mix) * lower)
        return -(inputs.row_weight * inputs.advantage * chosen).sum()

    def bounds(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """(B,) lower and upper bound per token."""
        weight = inputs.active_weight
        lower = (weight * inputs.new).sum((0, 2)) / inputs.length.clamp(min=1)
        seen = (weight > 0).any(0)  # (B, L)
        powers = (weight.log() + self.beta * inputs.new).where(seen, 0.0)
        upper = torch.logsumexp(powers, 0) / self.beta * seen
        return lower, upper.sum(1) / seen.sum(1).clamp(min=1)

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """(B,) of the lower bound per token; the loss does not use it."""
        return SequenceRatio(Clip()).log_ratio(inputs)

    def stopped(self, inputs: LossInputs) -> Tensor:
        """Which answers have no gradient, (B,) bool: none."""
        return torch.zeros_like(inputs.advantage, dtype=torch.bool)


Objective = TokenRatio | SequenceRatio | LinearBound | Sandwich
