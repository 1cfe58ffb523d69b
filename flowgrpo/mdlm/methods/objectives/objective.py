"""Objectives: losses of the estimated log-probabilities of answers.

An objective takes the log-probabilities l (n, B, L) of every view under the new policy, the old policy and the reference.
Its loss is a sum over rows, or over groups of rows, with the weights of `aggregation`. A `separable` loss is also a sum over
views, so it can be computed for some views at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.methods.objectives.covariance import Covariance
from flowgrpo.mdlm.methods.objectives.self_distillation import SelfDistillation
from flowgrpo.mdlm.methods.objectives.sequence_means import clamp_tokens, hoelder_log_mean
from flowgrpo.schema.base import Choice, Positive, Strict
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.balanced_clip import Balance
from flowgrpo.training.advantages.clipped_ratio import (
    LIMIT,
    Surrogate,
    both_bounds,
    bounded_exp,
    soft_gate_loss,
    surrogate_loss,
    surrogate_mask,
)

Pair = Annotated[list[Positive], Field(min_length=2, max_length=2)]


@dataclass(frozen=True, kw_only=True)
class GivenInputs:
    """Inputs of a loss for B answers in n views, before the policy computes its log-probabilities."""

    # (n, B, L) log p of the tokens that each view scores, under the policy that sampled the answers; 0 elsewhere. None if
    # that is still the trained policy.
    old: Tensor | None
    reference: Tensor | None  # the same under the reference; None without one
    weight: Tensor  # (n, B, L), of `Views`
    view_weight: Tensor  # (n,), of `Views`
    length: Tensor  # (B,) number of scored tokens
    advantage: Tensor  # (B,) of the answers, or (B, L) of their tokens
    group: Tensor  # (B,) int64, group of each answer
    rank: Tensor  # (B,) reward by which the objective ranks good answers; 0 without one, NaN if unknown
    token_weight: Tensor  # (B, L) of the aggregation
    active_views: Tensor  # (n, B) bool, views of each answer that the loss includes
    order: Tensor  # (B, L) int64 `Views.first`: the step that wrote each token, if the views follow the steps
    chosen: Tensor | None = None  # (B, L) bool tokens that `covariance` chose; None without one
    pull: Tensor | None = None  # (B, L) weights of `distillation`; None without one

    def of(self, rows: Tensor) -> GivenInputs:
        """Select the inputs of some answers, by their rows (int64)."""
        return GivenInputs(
            old=None if self.old is None else self.old[:, rows],
            reference=None if self.reference is None else self.reference[:, rows],
            weight=self.weight[:, rows],
            view_weight=self.view_weight,
            length=self.length[rows],
            advantage=self.advantage[rows],
            group=self.group[rows],
            rank=self.rank[rows],
            token_weight=self.token_weight[rows],
            active_views=self.active_views[:, rows],
            order=self.order[rows],
            chosen=None if self.chosen is None else self.chosen[rows],
            pull=None if self.pull is None else self.pull[rows],
        )

    def at(self, new: Tensor, active_views: Tensor) -> LossInputs:
        """Add the log-probabilities `new` of the policy; the loss includes only the `active_views`."""
        old = new.detach() if self.old is None else self.old
        return LossInputs(**{**vars(self), "new": new, "old": old, "active_views": active_views})


@dataclass(frozen=True, kw_only=True)
class LossInputs(GivenInputs):
    """Inputs of a loss for B answers in n views; gradients flow through `new`."""

    new: Tensor  # (n, B, L) log p of the tokens each view scores, 0 elsewhere
    old: Tensor  # the same under the policy that sampled the answers

    @property
    def active_weight(self) -> Tensor:
        """(n, B, L) weights, 0 outside the active views."""
        return self.weight * self.active_views[:, :, None]

    @property
    def token_advantage(self) -> Tensor:
        """Advantage (B, L) of tokens, or (B, 1) if all tokens of an answer share one."""
        return self.advantage if self.advantage.ndim == 2 else self.advantage[:, None]

    @property
    def row_weight(self) -> Tensor:
        """Weight (B,) of whole answers."""
        return self.token_weight.sum(1)

    def gap(self, other: Tensor) -> Tensor:
        """Return the weighted new - other (n, B, L); summed over views and tokens, the difference of the two estimates."""
        return self.active_weight * (self.new - other)


KL: dict[str, Callable[[Tensor], Tensor]] = {  # of d = new - other, on samples of the policy
    "k1": lambda gap: gap,  # unbiased, but its mean gradient is 0: it only measures
    "k2": lambda gap: gap.square() / 2,  # biased as a value, but its gradient is that of the KL
    # e^-d - 1 + d: unbiased and never negative, but useless for |d| of tens of nats, as those of whole answers.
    "k3": lambda gap: torch.expm1((-gap).clamp(max=LIMIT)) + gap,
}


class Divergence(Strict):
    """A KL term to the reference, or to the policy that sampled the answers."""

    form: Literal["k1", "k2", "k3"] = "k3"
    """k1 only measures; k2 has the gradient of the KL; k3 is unbiased and never negative."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL in the loss; 0 computes none."""
    level: Literal["token", "sequence"] = "token"
    """token: the KL of each token; sequence: that of the whole answer, divided by its length (ESPO's k2)."""
    target: Literal["reference", "base", "old"] = "reference"
    """reference: the start of training, with the adapters of model.lora.path; base: the model without adapters; old: the
    policy that sampled the answers (TraceRL)."""

    @property
    def reference(self) -> str | None:
        """Name of the KL's reference in `Weights`: `fixed` or `base`; None if no reference is computed."""
        return {"reference": "fixed", "base": "base"}.get(self.target) if self.beta > 0 else None

    def loss(self, inputs: LossInputs) -> Tensor | float:
        """Return the KL term of the loss, beta times the mean KL; 0 if beta is 0."""
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

    couples: ClassVar[bool] = False
    """Whether the loss of an answer depends on the others of its group, so that it needs whole groups at once."""
    by_token: ClassVar[bool] = False
    """Whether each token may have an advantage of its own."""

    if TYPE_CHECKING:  # a field in some subclasses, a property in others

        @property
        @abstractmethod
        def kl(self) -> Divergence:
            """The KL term."""

    @property
    def solutions(self) -> str | None:
        """Column of the prompts whose texts are trained on; None: the policy's own answers."""
        return None

    @property
    def token_score(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Function of logits (N, V) and tokens (N,) whose result (N,) is `LossInputs.new`; None: log p of the tokens."""
        return None

    def separable(self, views: Views) -> bool:
        """Return whether the loss is a sum over views, so that it can be computed for some of them at a time."""
        return False

    @abstractmethod
    def loss(self, inputs: LossInputs) -> Tensor:
        """Return the loss, a scalar."""

    @abstractmethod
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """Return how far the policy has moved: log ratios of tokens (B, L) or of answers (B,)."""

    @abstractmethod
    def stopped(self, inputs: LossInputs) -> Tensor:
        """Return which ratios have no gradient, bool in the shape of `log_ratio`."""

    def above(self, inputs: LossInputs) -> Tensor:
        """Return which of the ratios that `stopped` judges are above 1, bool in the same shape."""
        return self.log_ratio(inputs) > 0


class Ratio(Objective):
    """An objective of probability ratios between the policy and the one that sampled the answers."""

    clip_range: Positive | Pair = 0.2
    """How far a ratio may be from 1: one bound for both sides, or [low, high]."""
    surrogate: Surrogate = "clip"
    """Gradient of a ratio: clip, none beyond the clip range (PPO); kept_gradient, that of the bound there (GPPO);
    frozen_ratio, that of A log p times the clipped ratio (CISPO); tapered_ratio, that of A log p, times min(ratio, 1) for
    bad answers, without a clip range (TOPR)."""
    dual: Positive | None = None
    """With surrogate clip, the loss of a bad answer is at most this times |A| (arXiv 1912.09729); null: no such bound."""
    gate: Pair | None = None
    """Temperatures for A > 0 and A <= 0 of SAPO's soft gate (arXiv 2511.20347), in place of the clip; null: clip."""
    kl: Divergence = Divergence()
    """KL term to the reference, or to the policy that sampled the answers."""

    def ratio_loss(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of each ratio, in the shape of the log ratios."""
        if self.gate is not None:
            return soft_gate_loss(bounded_exp(log_ratio), advantage, *self.gate)
        loss = surrogate_loss(self.surrogate, log_ratio, advantage, self.clip_range)
        if self.dual is None:
            return loss
        # Dual clip (arXiv 1912.09729): the loss of a bad answer is at most dual |A|.
        return torch.where(advantage < 0, torch.minimum(loss, -self.dual * advantage), loss)

    def ratio_stopped(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return which ratios have no gradient, bool; with `gate` every ratio has one."""
        if self.gate is not None:
            return torch.zeros(log_ratio.shape, dtype=torch.bool, device=log_ratio.device)
        stopped = surrogate_mask(self.surrogate, log_ratio, advantage, self.clip_range)
        return stopped if self.dual is None else stopped | ((advantage < 0) & (bounded_exp(log_ratio) > self.dual))


class TokenRatio(Ratio):
    """A ratio for each token, from its log-probability summed over the views that score it (diffu-GRPO, CJ-GRPO, ...)."""

    name: Literal["token_ratio"] = "token_ratio"
    by_token: ClassVar[bool] = True
    balance: Balance | None = None
    """Move `clip_range` in each optimizer step until good tokens contribute as much as bad ones (BAPO, arXiv 2510.18927);
    null: it is constant."""
    covariance: Covariance | None = None
    """Give tokens whose log-probability moves with the advantage no gradient (Clip-Cov) or a penalty (KL-Cov), so that the
    entropy does not fall (arXiv 2505.22617); null: none."""
    distillation: SelfDistillation | None = None
    """Learn what good branches of a tree wrote on the canvas that they leave (d-TreeRPO, arXiv 2512.09675); null: no such
    term."""

    def balanced(self, log_ratio: Tensor, advantage: Tensor, reduce: Callable[[Tensor], Tensor]) -> TokenRatio:
        """Return this objective with the clip range that `balance` finds for tokens (N,); a collective call."""
        assert self.balance is not None, "the clip range is constant"
        found = self.balance.find(both_bounds(self.clip_range), bounded_exp(log_ratio), advantage, reduce)
        return self.model_copy(update={"clip_range": list(found)})

    @override
    def separable(self, views: Views) -> bool:
        return views.disjoint and (self.kl.beta == 0 or self.kl.level == "token")

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        weight = inputs.token_weight * (inputs.active_weight > 0).any(0)
        loss = (weight * self._each(inputs)).sum() + self.kl.loss(inputs)
        if inputs.pull is None:
            return loss
        return loss - (inputs.pull * (inputs.active_weight * inputs.new).sum(0)).sum()

    def _each(self, inputs: LossInputs) -> Tensor:
        """Return the loss (B, L) of each token, without weights."""
        log_ratio, advantage = self.log_ratio(inputs), inputs.token_advantage
        if self.covariance is None:
            return self.ratio_loss(log_ratio, advantage)
        assert inputs.chosen is not None, "no tokens were chosen"
        if self.covariance.rule == "clip":
            return self.ratio_loss(log_ratio, advantage).where(~inputs.chosen, 0.0)
        return -advantage * bounded_exp(log_ratio) + self.covariance.coefficient * log_ratio.abs() * inputs.chosen

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.gap(inputs.old).sum(0)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        stopped = self.ratio_stopped(self.log_ratio(inputs), inputs.token_advantage)
        if self.covariance is not None:
            assert inputs.chosen is not None, "no tokens were chosen"
            stopped = stopped | inputs.chosen if self.covariance.rule == "clip" else torch.zeros_like(stopped)
        return stopped & (inputs.active_weight > 0).any(0)


def sequence_log_prob(inputs: LossInputs, each: Tensor, normalised: bool = True) -> Tensor:
    """Return estimates (B,) of whole answers from `each` (n, B, L); with `normalised` divided by the answer's length."""
    whole = (inputs.active_weight * each).sum((0, 2))
    return whole / inputs.length.clamp(min=1) if normalised else whole


def sequence_log_ratio(inputs: LossInputs, normalised: bool = True) -> Tensor:
    """Return new - old (B,) of the estimates of whole answers; with `normalised` divided by the answer's length."""
    return sequence_log_prob(inputs, inputs.new - inputs.old, normalised)


class SequenceRatio(Ratio):
    """One ratio for each answer, from its whole log-probability (GSPO, arXiv 2507.18071; of ELBOs GDPO, arXiv 2510.08554).

    ELBOs of whole answers differ by many nats: without `normalised`, the first small step exceeds a clip of 0.2. GDPO
    divides the clipped loss by the length, not the log ratio; until the policy moves, both give the same gradient.
    """

    name: Literal["sequence_ratio"] = "sequence_ratio"
    normalised: bool = True
    """Divide the log ratio by the answer's length (GSPO, ESPO)."""
    power: float = 0.0
    """Exponent of the mean of the tokens' ratios: 0, geometric, the plain one; 1, arithmetic; -1, harmonic (HölderPO, arXiv
    2605.12058)."""
    clamp: Positive | Pair | None = None
    """Bounds of the tokens' log ratios, in place of a clip of the answer's ratio, one or [low, high]; the paper's are 0.4
    (GMPO, arXiv 2507.20673); null: clip."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        ratio = self.log_ratio(inputs)
        plain = self.clamp is not None
        each = -inputs.advantage * bounded_exp(ratio) if plain else self.ratio_loss(ratio, inputs.advantage)
        return (inputs.row_weight * each).sum() + self.kl.loss(inputs)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        gap = self._clamped(inputs)
        if self.power == 0:
            return sequence_log_prob(inputs, gap, self.normalised)
        return hoelder_log_mean(gap, inputs.active_weight, self.power)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        if self.clamp is None:
            return self.ratio_stopped(self.log_ratio(inputs), inputs.advantage)
        moving = (self._clamped(inputs) == inputs.new - inputs.old) & (inputs.active_weight > 0)
        return ~moving.any(2).any(0)

    def _clamped(self, inputs: LossInputs) -> Tensor:
        """Return the log ratios (n, B, L) of the tokens in each view, clamped if asked for."""
        gap = inputs.new - inputs.old
        if self.clamp is None:
            return gap
        return clamp_tokens(gap, inputs.advantage[:, None], *both_bounds(self.clamp))
