"""Distillation, and objectives of final samples: policy gradients, contrastive and preference losses.

L is a sample's log-probability at a noise level (minus a weighted error of the velocity), ell = L - L_anchor its log ratio
to the anchor, A its advantage. At equality with the anchor all of them have a gradient of the form -a grad L; they differ
in a and in their bounds. Losses that couple samples take the derivative in each L from a first pass without gradient, so
that no graph holds a whole group.
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


def optimality(advantage: Tensor, most: float) -> Tensor:
    """Return the probability (E,) of a good sample: A in [-most, most] mapped to [0, 1] (DiffusionNFT, 2509.16117)."""
    return (advantage / most / 2 + 0.5).clamp(0, 1)


class Gradient(PolicyGradient):
    """The plain policy gradient: -A ratio (EPG, arXiv 2602.04663), or without a ratio -A L (RWR, SFT, AWM)."""

    name: Literal["gradient"] = "gradient"
    ratio: bool = True
    """Weigh by the ratio to the anchor; false: -A log-probability, which nothing but divergences bounds."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantage * (plain_ratio(inputs) if self.ratio else inputs.log_prob)


class Proximal(PolicyGradient):
    """The policy gradient with the divergence from the anchor in its advantage: gradient -ratio (A - ell) grad L.

    PEPG of arXiv 2602.04663. Its PAR has the same gradient, since the released code detaches the ratio there. Stationary
    where ell = A.
    """

    name: Literal["proximal"] = "proximal"
    ratio: bool = True
    """Weigh by the ratio to the anchor, too."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        ell = (inputs.log_prob - inputs.old_log_prob).detach()
        weight = bounded_exp(ell) if self.ratio else 1.0
        return -weight * (inputs.advantage - ell) * inputs.log_prob


class Distill(PolicyGradient):
    """The divergence from a teacher alone (verl-omni's `distill_kl`), without advantages.

    The student's own states are the inputs, without gradient, so it learns where it goes itself. In steps of one kernel,
    with mean = P x + Q v and noise S, the exact KL is Q^2 / (2 S^2) mean (v - v_teacher)^2.
    """

    rewarded: ClassVar[bool] = False

    name: Literal["distill"] = "distill"

    @model_validator(mode="after")
    def _learns(self) -> Distill:
        if self.kl.beta == 0:
            raise InputError("algorithm.objective.kl.beta: distill has no other loss than the divergence, raise it")
        if self.kl.reference != "teacher":
            raise InputError(
                f"algorithm.objective.kl.reference: distill learns from a teacher, {self.kl.reference} is the student; take "
                "teacher"
            )
        return self

    @override
    def pulls(self, steps: Sequence[TrainedStep], sigma_cap: float) -> list[float]:
        return [0.0] * len(steps)

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return torch.zeros_like(inputs.log_prob)


class OfSamples(PolicyGradient):
    """Objectives that need noised samples."""

    likelihoods: ClassVar[Sequence[str]] = ("elbo",)


class TwoBranch(OfSamples):
    """DiffusionNFT (arXiv 2509.16117): good samples pull the velocity, bad ones its mirror image about the anchor's.

    With v+ = beta v + (1 - beta) v_anchor, v- = (1 + beta) v_anchor - beta v and l the weighted error of each, the loss is
    most (r l(v+) + (1 - r) l(v-)) / beta, r the optimality. In the unweighted error that is the linear term plus
    beta most |v - v_anchor|^2, so it bounds itself.
    """

    name: Literal["two_branch"] = "two_branch"
    beta: Positive = 1.0
    """How far each branch is from the anchor; smaller is faster and less stable."""
    most: Positive = 5.0
    """The advantage of a sample that is surely good; the baseline's clip."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        step = self.beta * (inputs.error - inputs.anchor_error)
        score, anchor = inputs.score, inputs.anchor_error
        good, bad = (-score(anchor + way) for way in (step, -step))
        r = optimality(inputs.advantage, self.most)
        return self.most / self.beta * (r * good + (1 - r) * bad)


class VelocityTarget(OfSamples):
    """RAM (arXiv 2605.10759): pull the velocity to v_ref + scale A (target - v_anchor), a target without gradient."""

    name: Literal["velocity_target"] = "velocity_target"
    scale: Positive = 1.0
    """Multiple of the advantage in the target."""

    @property
    @override
    def policies(self) -> set[str]:
        return super().policies | {"reference"}

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        aim = inputs.reference_error - self.scale * inputs.advantage[:, None] * inputs.anchor_error
        return (inputs.error - aim).square().mean(1)


class Centred(OfSamples):
    """CRD (arXiv 2603.14128): fit the log ratios, centred over an optimizer step, to the centred optimality.

    The loss is most / beta (beta (ell - mean ell) - (r - mean r))^2; the means have no gradient.
    """

    couples: ClassVar[Literal["nothing", "group", "step"]] = "step"

    name: Literal["centred"] = "centred"
    beta: Positive = 1.0
    """Multiple of the log ratio that is drawn to the optimality."""
    most: Positive = 5.0
    """The advantage of a sample that is surely good; the baseline's clip."""
    adaptive_kl: Rate | None = None
    """Hold bad samples less: the divergence from the reference is multiplied by m + (1 - m) r, m this; null: all alike."""

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
    """Objectives of the samples of a group together, at one noise level and with one noise."""

    couples: ClassVar[Literal["nothing", "group", "step"]] = "group"

    @abstractmethod
    def group_loss(self, ell: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of a group, from its K >= 2 log ratios (K,) to the anchor and advantages (K,)."""

    def coefficients(self, ell: Tensor, advantage: Tensor) -> Tensor:
        """Return the derivative (K,) of the group's loss in each log-probability, times K, for a mean over samples."""
        with torch.enable_grad():
            ell = ell.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.group_loss(ell, advantage), ell)
        return gradient * len(ell)

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.coefficient * inputs.log_prob


class OfPairs(Coupled):
    """Objectives of the best and the worst sample of a group."""

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
    def group_loss(self, ell: Tensor, advantage: Tensor) -> Tensor:
        best, worst = int(advantage.argmax()), int(advantage.argmin())
        return -torch.nn.functional.logsigmoid(self.beta / 2 * (ell[best] - ell[worst]))


class SemiPolicy(OfPairs):
    """SePPO (arXiv 2410.05255): the best sample of a group, and a sample that is not assumed to be worse.

    With w the best and r the worst of a group the loss is -ln sigmoid(beta (ell_w - sgn(ell_w) ell_r)), the sign without
    gradient. Where ell_w < 0, the anchor, which made r, denoises the best sample better than the policy, and r is learnt
    too; at ell_w = 0 it has no part. The equation is reconstructed from reviews of the paper.
    """

    name: Literal["semi_policy"] = "semi_policy"
    beta: Positive = 50.0
    """Sharpness of the preference, without the half of pair_preference."""

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor) -> Tensor:
        best, worst = ell[int(advantage.argmax())], ell[int(advantage.argmin())]
        return -torch.nn.functional.logsigmoid(self.beta * (best - best.detach().sign() * worst))


class GroupSigmoid(Coupled):
    """DGPO (arXiv 2510.08425): -A L of each sample, weighed by sigmoid(-beta / K sum A ell) of its group, without gradient.

    Samples whose ratio to the old policy has left the clip range, above where A > 0 and below elsewhere, have no gradient.
    """

    name: Literal["group_sigmoid"] = "group_sigmoid"
    beta: Positive = 100.0
    """Sharpness of the preference."""
    clip_range: ClipRange | None = None
    """Clip of the ratio to the old policy; null: none."""

    @property
    @override
    def policies(self) -> set[str]:
        return super().policies | ({"old"} if self.clip_range is not None else set())

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor) -> Tensor:
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


class PlackettLuce(Coupled):
    """GDRO (arXiv 2601.02036): the likelihood of the group's softened ranking, and a pull to its best sample.

    With s = beta ell and samples sorted by advantage: the sum over places i of ln sum_{m >= i} exp s_m - sum_{j >= i}
    q_i(j) s_j, q_i the softmax over the rest of A / temperature; and `best` times -L of the first. The order by falling
    reward is implied by the form. It is not known whether a group shares its noise.
    """

    name: Literal["plackett_luce"] = "plackett_luce"
    beta: Positive = 12.0
    """Multiple of the log ratio in a sample's score."""
    temperature: Positive = 0.05
    """Of the softmax over advantages; near 0 the ranking is hard."""
    best: NotNegative = Field(0.5)
    """Coefficient of the pull to the group's best sample."""

    @override
    def takes(self, advantage: Tensor) -> Tensor:
        return super().takes(advantage) & (advantage.max() > advantage.min())

    @override
    def group_loss(self, ell: Tensor, advantage: Tensor) -> Tensor:
        order = advantage.argsort(descending=True, stable=True)
        score, wish = self.beta * ell[order], advantage[order] / self.temperature
        places = [
            torch.logsumexp(score[i:], 0) - (torch.softmax(wish[i:], 0) * score[i:]).sum() for i in range(len(ell) - 1)
        ]
        return torch.stack(places).sum() - self.best * ell[order[0]]
