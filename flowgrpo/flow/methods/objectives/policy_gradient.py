"""Policy-gradient objectives: the loss of an edge, the weights of the steps, and the divergences added to the loss."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice, Positive, Strict
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.advantages.clipped_ratio import (
    Surrogate,
    bounded_exp,
    soft_gate_loss,
    surrogate_loss,
    surrogate_mask,
)

if TYPE_CHECKING:
    from samplers import kernels
    from samplers.kernels import Kernel, State
else:
    kernels = lazy("samplers.kernels")

ABSENT: Any = None  # default of inputs that only some objectives need
ClipRange = Positive | Annotated[list[Positive], Field(min_length=2, max_length=2)]
TrainedStep = tuple["Kernel", float, float]  # kernel, sigma, sigma_next


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of a loss for E edges of one model evaluation, or for E noised samples (likelihood elbo).

    Gradients flow through `log_prob`, `mean`, `velocity` and `error`.

    Attributes:
        log_prob: (E,) log-probability of each edge or sample under the live policy.
        old_log_prob: (E,) that of each edge in the rollout, or of each sample under the likelihood's anchor.
        mean, std: mean (tensors (E, ...)) and standard deviation (one number) of the step's Gaussian.
        step_size: sigma - sigma_next, positive.
        diffuses: whether std is g sqrt(step_size), see `samplers.kernels.Kernel`.
        earlier: (E,) sum of the log ratios of the trained steps before each edge on its path, without gradient.
        position: (E,) int64, number of each edge among the trained steps of its path, from 1.
        whole: (E,) sum of the log ratios of all trained steps of each edge's trajectory, without gradient; above a split
            the mean over the trajectories through the edge.
        length: (E,) number of the steps in `whole`, of which the same mean is taken.
        error: (E, D) velocity minus its target for a noised sample; `anchor_error`, `old_error` and
            `reference_error` are the same under the anchor, the old policy and the reference.
        score: function from an error to a log-probability (E,).
        coefficient: (E,) derivative of the loss in each log-probability, for objectives that couple samples.
        centre: means of the log ratio and of the optimality over the optimizer step.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    mean: State | None = None
    std: float = ABSENT
    step_size: float = ABSENT
    velocity: State | None = None
    diffuses: bool = True
    old_mean: State | None = None
    reference_mean: State | None = None
    reference_velocity: State | None = None
    earlier: Tensor = ABSENT
    position: Tensor = ABSENT
    whole: Tensor = ABSENT
    length: Tensor = ABSENT
    error: Tensor = ABSENT
    anchor_error: Tensor = ABSENT
    old_error: Tensor = ABSENT
    reference_error: Tensor = ABSENT
    score: Callable[[Tensor], Tensor] = ABSENT
    coefficient: Tensor = ABSENT
    centre: tuple[float, float] = ABSENT


def noise_aware(steps: Sequence[TrainedStep], sigma_cap: float) -> list[float]:
    """Return the weight of each step: std / (mean std), TempFlow-GRPO's noise-aware weighting (arXiv 2508.04324).

    It cancels the 1 / std in the gradient. The released code multiplies std by 2.25, which is 1 / (mean std) for SD3.5.
    """
    stds = [kernels.slope(*step, sigma_cap)[1] for step in steps]
    return [std * len(stds) / sum(stds) for std in stds]


def equalise(steps: Sequence[TrainedStep], sigma_cap: float) -> list[float]:
    """Return the weight of each step: (median of N) / N, SAGE-GRPO's equaliser (arXiv 2603.21872).

    N is `samplers.kernels.pull`, the size of the step's gradient, so that the weighted gradients have equal sizes. For
    averaged log-probabilities N is the paper's |d mean / d v| / std. A step with N = 0 has weight 1. As in the released
    code, the median of an even number of values is the lower of the two middle ones.
    """
    sizes = [kernels.pull(*step, sigma_cap) for step in steps]
    middle = statistics.median_low(sizes)
    return [middle / size if size > 0 else 1.0 for size in sizes]


STEP_WEIGHTS = {"noise_aware": noise_aware, "equalised": equalise}


def exact_kl(inputs: LossInputs) -> Tensor:
    """Return the KL (E,) of the step from the reference's, a mean over dimensions: mean (mu - mu_ref)^2 / (2 std^2)."""
    return _mean_square(inputs.mean, inputs.reference_mean) / (2 * inputs.std**2)


def flow_grpo_kl(inputs: LossInputs) -> Tensor:
    """Return the divergence (E,) of Flow-GRPO's code: mean (mu - mu_ref)^2 / (2 s^2), with s the code's `std_dev_t`.

    For `flow_sde` s is g, where std = g sqrt(step size). For `cps` s is std, so the divergence is the exact KL. It is
    the exact KL for every other kernel without `diffuses`, too.
    """
    return exact_kl(inputs) * (inputs.step_size if inputs.diffuses else 1.0)


def velocity_kl(inputs: LossInputs) -> Tensor:
    """Return the squared distance (E,) of the velocity from the reference's, averaged over dimensions."""
    if inputs.error is not None:
        return (inputs.error - inputs.reference_error).square().mean(1)
    return _mean_square(inputs.velocity, inputs.reference_velocity)


KL = {"exact": exact_kl, "flow_grpo": flow_grpo_kl, "velocity": velocity_kl}


def previous_kl(inputs: LossInputs) -> Tensor:
    """Return the KL (E,) of the step from the rollout policy's step, averaged over dimensions.

    For noised samples it is the squared distance of the velocity from the old policy's, averaged over dimensions.
    """
    if inputs.error is not None:
        return (inputs.error - inputs.old_error).square().mean(1)
    return _mean_square(inputs.mean, inputs.old_mean) / (2 * inputs.std**2)


class Divergence(Strict):
    """Divergences from the reference and from the rollout policy; with both, SAGE-GRPO's dual trust region."""

    form: Literal["flow_grpo", "exact", "velocity"] = "flow_grpo"
    """exact: KL of the step's Gaussians; flow_grpo: that KL times the step size; velocity: squared distance of v."""
    beta: float = Field(0.0, ge=0)
    """Coefficient of the divergence from the reference; 0: it is not computed."""
    reference: Literal["fixed", "base", "moving", "teacher"] = "fixed"
    """fixed: the policy at the start of training, with the adapters of model.lora.path; base: the model without
    adapters; moving: a copy of the policy, renewed every `refresh` optimizer steps; teacher: the model of
    model.teacher."""
    refresh: int = Field(10, ge=1)
    """Optimizer steps between two copies of a moving reference."""
    previous: float = Field(0.0, ge=0)
    """Coefficient, as a multiple of beta, of the KL from the rollout policy. That KL is 0 in an iteration's first
    update. With elbo it is the squared distance from the old policy's velocity."""
    target: Positive | None = None
    """Divergence towards which the coefficient adapts after each iteration; null: the coefficient is constant."""
    max_beta: Positive | None = None
    """Largest coefficient, if it adapts; beta is the smallest."""

    @model_validator(mode="after")
    def _adapts(self) -> Divergence:
        if (self.target is None) != (self.max_beta is None) or (self.max_beta or self.beta) < self.beta:
            raise InputError(
                "algorithm.objective.kl: to adapt the coefficient give target and max_beta, with 0 < beta <= max_beta"
            )
        if self.beta == 0 and (self.previous or self.target):
            raise InputError("algorithm.objective.kl.beta: previous and target need a value above 0")
        return self

    def adapt(self, beta: float, measured: float | None) -> float:
        """Return the coefficient of the next iteration, from the last one and the measured divergence.

        PPO's rule (arXiv 1707.06347, section 4): double it if the divergence is above 1.5 target, halve it if the
        divergence is below target / 1.5. It stays within `beta` and `max_beta`. SAGE-GRPO adapts its coefficient
        between 1e-7 and 1e-5, by a rule that we do not know.
        """
        if self.target is None or self.max_beta is None or measured is None:
            return beta
        beta = beta * 2 if measured > 1.5 * self.target else beta / 2 if measured < self.target / 1.5 else beta
        return min(max(beta, self.beta), self.max_beta)


class PolicyGradient(Choice):
    """Options of every objective: the steps' weights in the loss, and divergences, which are added without weights."""

    likelihoods: ClassVar[Sequence[str]] = ("trajectory", "elbo")
    """Likelihoods that the objective can train."""
    couples: ClassVar[Literal["nothing", "group", "step"]] = "nothing"
    """Other samples that a sample's loss depends on: its group, or all samples of the optimizer step."""
    span: ClassVar[Literal["edge", "prefix", "trajectory"]] = "edge"
    """Steps whose log ratios an edge's ratio contains: its own, those of its path up to it, or those of its trajectory."""
    pairs: ClassVar[bool] = False
    """Whether the objective trains only on the best and the worst sample of a group."""
    rewarded: ClassVar[bool] = True
    """Whether the loss depends on the advantages."""

    step_weights: Literal["none", "noise_aware", "equalised"] = "none"
    """Weights of the steps in the loss: none, noise_aware (std / mean std) or equalised (gradients of equal size)."""
    kl: Divergence = Divergence()
    """Divergences added to the loss."""

    @model_validator(mode="before")
    @classmethod
    def _of_texts(cls, written: Any) -> Any:
        if isinstance(written, dict) and "covariance" in written:
            raise InputError(
                "algorithm.objective.covariance: the steps of a flow have constant entropy; this option is for "
                "kind: mdlm, remove it"
            )
        return written

    @abstractmethod
    def loss(self, inputs: LossInputs) -> Tensor:
        """Return the loss (E,) of the edges, without the divergence and without the weights of the steps."""

    def clipped(self, inputs: LossInputs) -> Tensor:
        """Return a mask (E,) of the edges that a bound of the objective gives zero gradient; by default none."""
        return torch.zeros_like(inputs.advantage, dtype=torch.bool)

    def above(self, inputs: LossInputs) -> Tensor:
        """Return a mask (E,) of the edges whose ratio, the one that `clipped` bounds, is above 1."""
        return inputs.log_prob > inputs.old_log_prob

    @property
    def policies(self) -> set[str]:
        """Return the names of the policies needed besides the live one and the likelihood's anchor."""
        return {name for name, asked in (("reference", self.kl.beta), ("old", self.kl.previous)) if asked}

    def takes(self, advantage: Tensor) -> Tensor:
        """Return a mask (K,) of the samples of a group that enter the loss, from their advantages (K,)."""
        return torch.ones_like(advantage, dtype=torch.bool)

    @property
    def needs_old_means(self) -> bool:
        """Return whether the rollout must keep the Gaussian means of its steps."""
        return self.kl.previous > 0

    def weights(self, steps: Sequence[TrainedStep], sigma_cap: float) -> dict[TrainedStep, float]:
        """Return the weight of each of the trained steps."""
        if self.step_weights == "none":
            return dict.fromkeys(steps, 1.0)
        return dict(zip(steps, STEP_WEIGHTS[self.step_weights](steps, sigma_cap), strict=True))

    def pulls(self, steps: Sequence[TrainedStep], sigma_cap: float) -> list[float]:
        """Return the size of the loss's gradient in v at each trained step, as in `samplers.kernels.pull`."""
        weights = self.weights(steps, sigma_cap)
        return [kernels.pull(*step, sigma_cap) * weights[step] for step in steps]

    def holds(self, steps: Sequence[TrainedStep], sigma_cap: float) -> list[float]:
        """Return the curvature of the divergence at each trained step: D d^2 divergence / dv_i^2, for D dimensions."""

        def curvature(kernel: Kernel, sigma: float, sigma_next: float) -> float:
            moved, std = kernels.slope(kernel, sigma, sigma_next, sigma_cap)
            factor = sigma - sigma_next if self.kl.form == "flow_grpo" and kernel.diffuses else 1.0
            return (moved / std) ** 2 * factor if std > 0 else 0.0

        return [2.0 if self.kl.form == "velocity" else curvature(*step) for step in steps]

    def divergence(self, inputs: LossInputs) -> Tensor:
        """Return the divergence (E,) from the reference, plus `previous` times the one from the rollout policy."""
        pull = KL[self.kl.form](inputs)
        return pull + self.kl.previous * previous_kl(inputs) if self.kl.previous else pull


def plain_ratio(inputs: LossInputs) -> Tensor:
    """Return exp(log_prob - old_log_prob) (E,)."""
    return bounded_exp(inputs.log_prob - inputs.old_log_prob)


class Clipped(PolicyGradient):
    """Options of clipped objectives."""

    clip_range: ClipRange = 1e-4
    """The ratio is clipped to [1 - c, 1 + c]; with [low, high], to [1 - low, 1 + high]."""
    surrogate: Surrogate = "clip"
    """Gradient of an edge: clip, none beyond the clip range (PPO); kept_gradient, that of the bound there (GPPO);
    frozen_ratio, that of A log p times the clipped ratio (CISPO); tapered_ratio, that of A log p, times min(ratio, 1) for
    bad edges, without a clip range (TOPR)."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return surrogate_loss(self.surrogate, self.log_ratio(inputs), inputs.advantage, self.clip_range)

    @override
    def clipped(self, inputs: LossInputs) -> Tensor:
        return surrogate_mask(self.surrogate, self.log_ratio(inputs), inputs.advantage, self.clip_range)

    @override
    def above(self, inputs: LossInputs) -> Tensor:
        return self.log_ratio(inputs) > 0

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """Return the log (E,) of the ratio that is clipped."""
        return inputs.log_prob - inputs.old_log_prob


class Clip(Clipped):
    """PPO's clipped ratio (arXiv 1707.06347), as in Flow-GRPO."""

    name: Literal["clip"] = "clip"


class NormalisedRatio(Clipped):
    """GRPO-Guard (arXiv 2510.22319): a clipped ratio of equal variance at every step; the loss is divided by step size.

    The ratio is exp((log_prob - old_log_prob + mean (mu - mu_old)^2 / (2 std^2)) std). For averaged log-probabilities
    the exponent is mean((mu - mu_old) noise), without the bias that makes plain ratios smaller than 1.
    """

    likelihoods: ClassVar[Sequence[str]] = ("trajectory",)

    name: Literal["normalised_ratio"] = "normalised_ratio"
    clip_range: ClipRange = 2e-6
    """The normalised ratio is clipped to [1 - c, 1 + c]; with [low, high], to [1 - low, 1 + high]."""

    @property
    @override
    def needs_old_means(self) -> bool:
        return True

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        bias = _mean_square(inputs.mean, inputs.old_mean) / (2 * inputs.std**2)
        return (inputs.log_prob - inputs.old_log_prob + bias) * inputs.std

    @override
    def pulls(self, steps: Sequence[TrainedStep], sigma_cap: float) -> list[float]:
        plain = super().pulls(steps, sigma_cap)
        return [
            size * kernels.slope(*step, sigma_cap)[1] / (step[1] - step[2])
            for size, step in zip(plain, steps, strict=True)
        ]

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return super().loss(inputs) / inputs.step_size


class KlMask(PolicyGradient):
    """Flow-DPPO (arXiv 2606.11025): the loss -A ratio, set to 0 where the step's KL from the rollout reaches `limit`.

    This stops only edges whose ratio has moved in the direction of the advantage: above 1 if A > 0, below 1 if A < 0.
    An edge that has moved the other way is still pulled back. The KL is mean (mu - mu_old)^2 / (2 std^2), averaged over
    dimensions as in the released code; the paper sums over dimensions.
    """

    likelihoods: ClassVar[Sequence[str]] = ("trajectory",)

    name: Literal["kl_mask"] = "kl_mask"
    limit: Positive = 1e-5
    """KL of a step from the rollout's step, averaged over dimensions, at which the edge is stopped."""

    @property
    @override
    def needs_old_means(self) -> bool:
        return True

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return (-inputs.advantage * plain_ratio(inputs)).where(~self.clipped(inputs), 0.0)

    @override
    def clipped(self, inputs: LossInputs) -> Tensor:
        moved_with_advantage = (inputs.log_prob - inputs.old_log_prob).detach() * inputs.advantage > 0
        return (previous_kl(inputs).detach() >= self.limit) & moved_with_advantage


class SoftGate(PolicyGradient):
    """SAPO (arXiv 2511.20347): a soft gate in place of a clip, with temperatures for A > 0 and for A <= 0.

    The inverse of a temperature acts like a clip range. The paper's temperatures are 1.0 and 1.05, for ratios of
    tokens; our defaults are for averaged log-probabilities.
    """

    name: Literal["soft_gate"] = "soft_gate"
    temperature: Annotated[list[Positive], Field(min_length=2, max_length=2)] = [1.0e4, 1.05e4]
    """Temperatures of the gate, for A > 0 and for A <= 0."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return soft_gate_loss(plain_ratio(inputs), inputs.advantage, *self.temperature)


def _mean_square(a: State | None, b: State | None) -> Tensor:
    assert a is not None  # the objective requests both
    assert b is not None
    return torch.cat([(x.float() - y.float()).flatten(1) for x, y in zip(a, b, strict=True)], dim=1).square().mean(1)
