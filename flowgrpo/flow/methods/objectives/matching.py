"""Distillation, and objectives on final samples: policy gradients, contrastive losses and preference losses.

L is a sample's log-probability at a noise level: minus the weighted squared error of the velocity. ell = L - L_anchor
is its log ratio to the anchor, A its advantage. Where the policy equals the anchor, every loss on final samples has a
gradient of the form -a grad L; they differ in a and in their bounds. Losses that couple samples compute the
derivative in each L in a first pass without gradient, so that no autograd graph holds a whole group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.objectives.policy_gradient import (
    ClipRange,
    LossInputs,
    PolicyGradient,
    TrainedStep,
    plain_ratio,
)
from flowgrpo.schema.base import NotNegative, Positive, Rate
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages import clipped_ratio
from flowgrpo.training.advantages.clipped_ratio import both_bounds, bounded_exp
from flowgrpo.training.advantages.group_options import ContrastOptions, RegressionOptions


def optimality(advantage: Tensor, most: float) -> Tensor:
    """Return the optimality (E,): A in [-most, most] mapped linearly to [0, 1] (DiffusionNFT, arXiv 2509.16117)."""
    return (advantage / most / 2 + 0.5).clamp(0, 1)


class Gradient(PolicyGradient):
    """The plain policy gradient: loss -A ratio (EPG, arXiv 2602.04663), or -A L without a ratio (RWR, SFT, AWM)."""

    name: Literal["gradient"] = "gradient"
    ratio: bool = True
    """true: -A x ratio to the anchor; false: -A x log-probability, which only divergences bound."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantage * (plain_ratio(inputs) if self.ratio else inputs.log_prob)


class Proximal(PolicyGradient):
    """Policy gradient; ell, the log ratio to the anchor, is taken off the advantage: -ratio (A - ell) grad L.

    It is PEPG of arXiv 2602.04663. PAR of the same paper has the same gradient, because the released code detaches its
    ratio. The gradient is 0 where ell = A.
    """

    name: Literal["proximal"] = "proximal"
    ratio: bool = True
    """Multiply by the ratio to the anchor, without gradient."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        ell = (inputs.log_prob - inputs.old_log_prob).detach()
        weight = bounded_exp(ell) if self.ratio else 1.0
        return -weight * (inputs.advantage - ell) * inputs.log_prob


class Distill(PolicyGradient):
    """On-policy distillation: the divergence from a teacher alone (verl-omni's `distill_kl`), without advantages.

    The inputs are the states that the student itself visits, without gradient. For a kernel step with mean = P x + Q v
    and std S, the exact KL is Q^2 / (2 S^2) mean (v - v_teacher)^2.
    """

    rewarded: ClassVar[bool] = False

    name: Literal["distill"] = "distill"

    @model_validator(mode="after")
    def _learns(self) -> Distill:
        if self.kl.beta == 0:
            raise InputError(
                "algorithm.objective.kl.beta: the divergence is the only loss of distill; take a value above 0"
            )
        if self.kl.reference != "teacher":
            raise InputError(
                f"algorithm.objective.kl.reference: distill learns from a teacher, but {self.kl.reference} is the "
                "student; take teacher"
            )
        return self

    @override
    def pulls(self, steps: Sequence[TrainedStep], sigma_cap: float) -> list[float]:
        return [0.0] * len(steps)

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return torch.zeros_like(inputs.log_prob)


class OfSamples(PolicyGradient):
    """Options of objectives that need noised final samples (likelihood elbo)."""

    likelihoods: ClassVar[Sequence[str]] = ("elbo",)


class TwoBranch(OfSamples):
    """DiffusionNFT (arXiv 2509.16117): good samples fit the velocity; bad ones fit its mirror image about the anchor's.

    Let v+ = beta v + (1 - beta) v_anchor, v- = (1 + beta) v_anchor - beta v, l the weighted squared error, and r the
    optimality. The loss is `most` times (r l(v+) + (1 - r) l(v-)) / beta. For unweighted errors it is a term linear in v,
    plus `most` times beta |v - v_anchor|^2, which keeps v near the anchor.
    """

    name: Literal["two_branch"] = "two_branch"
    beta: Positive = 1.0
    """Distance of each branch from the anchor; smaller is faster and less stable."""
    most: Positive = 5.0
    """The advantage of a sample that is surely good; the baseline's clip."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        step = self.beta * (inputs.error - inputs.anchor_error)
        score, anchor = inputs.score, inputs.anchor_error
        good, bad = (-score(anchor + signed_step) for signed_step in (step, -step))
        r = optimality(inputs.advantage, self.most)
        return self.most / self.beta * (r * good + (1 - r) * bad)


class VelocityTarget(OfSamples):
    """RAM (arXiv 2605.10759): regression of the velocity to the constant v_ref + scale A (target - v_anchor)."""

    name: Literal["velocity_target"] = "velocity_target"
    scale: Positive = 1.0
    """Coefficient of the advantage in the regression target."""

    @property
    @override
    def policies(self) -> set[str]:
        return super().policies | {"reference"}

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        aim = inputs.reference_error - self.scale * inputs.advantage[:, None] * inputs.anchor_error
        return (inputs.error - aim).square().mean(1)


class Centred(OfSamples):
    """CRD (arXiv 2603.14128): regression of the centred log ratios ell to the centred optimality r.

    Loss: most / beta (beta (ell - mean ell) - (r - mean r))^2. The means, over an optimizer step, have no gradient.
    """

    couples: ClassVar[Literal["nothing", "group", "step"]] = "step"

    name: Literal["centred"] = "centred"
    beta: Positive = 1.0
    """Coefficient of the log ratio in the regression."""
    most: Positive = 5.0
    """The advantage of a sample that is surely good; the baseline's clip."""
    adaptive_kl: Rate | None = None
    """m: multiply a sample's divergence from the reference by m + (1 - m) r, less for bad samples; null: by 1."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        mean_ell, mean_r = inputs.centre
        ell = self.beta * (inputs.log_prob - inputs.old_log_prob - mean_ell)
        return self.most / self.beta * (ell - (optimality(inputs.advantage, self.most) - mean_r)).square()

    @override
    def divergence(self, inputs: LossInputs) -> Tensor:
        divergence = super().divergence(inputs)
        if self.adaptive_kl is None:
            return divergence
        return divergence * (self.adaptive_kl + (1 - self.adaptive_kl) * optimality(inputs.advantage, self.most))


class Coupled(OfSamples):
    """Options of objectives that couple the samples of a group, which share noise levels and noise."""

    couples: ClassVar[Literal["nothing", "group", "step"]] = "group"

    @abstractmethod
    def group_loss(self, ell: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        """Return the loss of K >= 2 samples of a group, from log ratios to the anchor, advantages and ranks (K,).

        `rank` is the reward by which the objective ranks good samples; 0 without one, NaN if unknown.
        """

    def coefficients(self, ell: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        """Return K times the derivative (K,) of the group's loss by each log-probability; a mean over samples cancels K."""
        with torch.enable_grad():
            ell = ell.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.group_loss(ell, advantage, rank), ell)
        return gradient * len(ell)

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.coefficient * inputs.log_prob


class OfPairs(Coupled):
    """Options of objectives that train on the best and the worst sample of a group."""

    pairs: ClassVar[bool] = True

    @override
    def takes(self, advantage: Tensor) -> Tensor:
        pair = torch.zeros_like(advantage, dtype=torch.bool)
        if advantage.max() > advantage.min():
            pair[[int(advantage.argmax()), int(advantage.argmin())]] = True
        return pair


class PairPreference(OfPairs):
    """Online DPO: -ln sigmoid(beta / 2 (ell_best - ell_worst)) of the best and the worst sample of a group.

    A group of equal rewards has no pair; Flow-GRPO's code pairs its first two samples.
    """

    name: Literal["pair_preference"] = "pair_preference"
    beta: Positive = 100.0
    """Sharpness of the preference."""

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        best, worst = int(advantage.argmax()), int(advantage.argmin())
        return -torch.nn.functional.logsigmoid(self.beta / 2 * (ell[best] - ell[worst]))


class SemiPolicy(OfPairs):
    """SePPO (arXiv 2410.05255): the best sample w of a group, and the anchor's sample r, which may be good or bad.

    The loss is -ln sigmoid(beta (ell_w - sgn(ell_w) ell_r)), the sign without gradient; r is the worst of the group. If
    ell_w < 0, the anchor fits the best sample better than the policy does. Then r, which the anchor made, is learnt
    too. If ell_w = 0, r has no gradient. The equation is reconstructed from reviews of the paper.
    """

    name: Literal["semi_policy"] = "semi_policy"
    beta: Positive = 50.0
    """Sharpness of the preference; unlike in pair_preference it is not halved."""

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        best, worst = ell[int(advantage.argmax())], ell[int(advantage.argmin())]
        return -torch.nn.functional.logsigmoid(self.beta * (best - best.detach().sign() * worst))


class GroupSigmoid(Coupled):
    """DGPO (arXiv 2510.08425): the loss -A L of each sample, times sigmoid(-beta / K sum A ell) of its group.

    The sigmoid has no gradient. Samples whose ratio to the old policy has left the clip range have no gradient: above
    it if A > 0, below it if A < 0.
    """

    name: Literal["group_sigmoid"] = "group_sigmoid"
    beta: Positive = 100.0
    """Sharpness of the preference."""
    clip_range: ClipRange | None = None
    """Clip range of the ratio to the old policy; null: no clip."""

    @property
    @override
    def policies(self) -> set[str]:
        return super().policies | ({"old"} if self.clip_range is not None else set())

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        weight = torch.sigmoid(-self.beta * (advantage * ell).mean()).detach()
        return -(weight * advantage * ell).mean()

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return super().loss(inputs).where(~self.clipped(inputs), 0.0)

    @override
    def clipped(self, inputs: LossInputs) -> Tensor:
        if self.clip_range is None:
            return super().clipped(inputs)
        ratio = bounded_exp(inputs.log_prob.detach() - inputs.score(inputs.old_error))
        return clipped_ratio.clip_mask(ratio, inputs.advantage, *both_bounds(self.clip_range))

    @override
    def above(self, inputs: LossInputs) -> Tensor:
        if self.clip_range is None:
            return super().above(inputs)
        return inputs.log_prob > inputs.score(inputs.old_error)


class Regression(RegressionOptions, Coupled):
    """Reg-GRPO (arXiv 2506.07464): regression of a group's advantages on its log ratios, without clip and ratio.

    At each noise level the log ratios to the anchor are centred in the group, and divided by their standard deviation or
    multiplied by a number.
    """

    name: Literal["regression"] = "regression"

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        return self.regression(ell, advantage)


class Contrast(ContrastOptions, Coupled):
    """DisCO (arXiv 2505.12366): raises the log ratios of a group's good samples (A > 0) above those of its bad ones.

    Groups of one size pull alike, however many good and bad samples they have. The paper, on language models, scores by
    log-probabilities; that of a noised sample is mostly the energy of its noise, so here scores are log ratios. `rank_by`
    makes it DRPO (arXiv 2510.04474), which weighs the good samples by a second reward.
    """

    name: Literal["contrast"] = "contrast"

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        return self.contrast(ell, ell, advantage, rank)


class PlackettLuce(Coupled):
    """GDRO (arXiv 2601.02036): Plackett-Luce likelihood of a group's softened ranking, and a term for its best sample.

    Let s = beta ell, with samples sorted by falling advantage, and q_i the softmax of A / temperature over the samples
    j >= i. The loss is the sum over places i of (ln sum_{j >= i} exp s_j - sum_{j >= i} q_i(j) s_j), minus `best` times
    the log ratio of the best sample. The paper's formula implies the order by falling reward. We do not know whether
    its groups share noise.
    """

    name: Literal["plackett_luce"] = "plackett_luce"
    beta: Positive = 12.0
    """Coefficient of the log ratio in a sample's score s."""
    temperature: Positive = 0.05
    """Temperature of the softmax over advantages; near 0 the ranking is hard."""
    best: NotNegative = Field(0.5)
    """Coefficient of the term for the group's best sample."""

    @override
    def takes(self, advantage: Tensor) -> Tensor:
        return super().takes(advantage) & (advantage.max() > advantage.min())

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        order = advantage.argsort(descending=True, stable=True)
        score, wish = self.beta * ell[order], advantage[order] / self.temperature
        places = [
            torch.logsumexp(score[i:], 0) - (torch.softmax(wish[i:], 0) * score[i:]).sum() for i in range(len(ell) - 1)
        ]
        return torch.stack(places).sum() - self.best * ell[order[0]]
