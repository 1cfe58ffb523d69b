"""How does the policy move?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from flowgrpo import objectives
from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice, Positive, Strict
from flowgrpo.training import surrogate
from samplers.kernels import pull, slope

ClipRange = Positive | Annotated[list[Positive], Field(min_length=2, max_length=2)]


class Divergence(Strict):
    """A pull to the reference: `beta` times the form of KL (see `flowgrpo.objectives`); 0 computes no reference.

    The reference is the `fixed` start of training, or `moving`: the policy itself, copied every `refresh` optimizer steps.
    `previous` adds so many times the KL from the policy that made the rollout (with it, SAGE-GRPO's dual region), which is 0
    in the first of an iteration's updates.
    With a `target` the coefficient adapts between `beta` and `max_beta`, after each iteration.
    """

    form: Literal["flow_grpo", "exact", "velocity"] = "flow_grpo"
    beta: float = Field(0.0, ge=0)
    reference: Literal["fixed", "moving"] = "fixed"
    refresh: int = Field(10, ge=1)
    previous: float = Field(0.0, ge=0)
    target: Positive | None = None
    max_beta: Positive | None = None

    @model_validator(mode="after")
    def _adapts(self) -> Divergence:
        if (self.target is None) != (self.max_beta is None) or (self.max_beta or self.beta) < self.beta:
            raise InputError(
                "algorithm.objective.kl: to adapt the coefficient give target and max_beta, with 0 < beta <= max_beta"
            )
        if self.beta == 0 and (self.previous or self.target or self.reference == "moving"):
            raise InputError(
                "algorithm.objective.kl.beta: 0 switches previous, target and a moving reference off, raise it"
            )
        return self

    def adapted(self, beta: float, measured: float | None) -> float:
        """The coefficient after an iteration that had `beta` and measured this divergence."""
        if self.target is None or measured is None:
            return beta
        return objectives.adapted(beta, measured, self.target, self.beta, self.max_beta)


class PolicyGradient(Choice):
    """Options of objectives of the ratio: weights of the steps, and divergences, which the weights do not touch."""

    step_weights: Literal["none", "noise_aware", "equalised"] = "none"
    kl: Divergence = Divergence()

    @property
    def needs_old_means(self) -> bool:
        """Whether the rollout must keep the means of its steps."""
        return self.kl.previous > 0

    def weights(self, steps: Sequence[objectives.TrainedStep], sigma_cap: float) -> dict[objectives.TrainedStep, float]:
        """Weight of each of the trained steps."""
        if self.step_weights == "none":
            return dict.fromkeys(steps, 1.0)
        return dict(zip(steps, objectives.STEP_WEIGHTS[self.step_weights](steps, sigma_cap), strict=True))

    def pulls(self, steps: Sequence[objectives.TrainedStep], sigma_cap: float) -> list[float]:
        """How hard the loss of each of the trained steps pulls at the velocity, see `samplers.kernels.pull`."""
        weights = self.weights(steps, sigma_cap)
        return [pull(*step, sigma_cap) * weights[step] for step in steps]

    def holds(self, steps: Sequence[objectives.TrainedStep], sigma_cap: float) -> list[float]:
        """How strictly the divergence holds the velocity at each of the trained steps: its second derivative, but for D."""
        return [objectives.hold(self.kl.form, step, sigma_cap) for step in steps]

    def divergence(self, terms: objectives.Terms) -> torch.Tensor:
        """Divergence (E,) in the chosen form."""
        pull = objectives.KL[self.kl.form](terms)
        return pull + self.kl.previous * objectives.previous_kl(terms) if self.kl.previous else pull


class Clipped(PolicyGradient):
    """Options of clipped objectives. `clip_range` is one bound for both sides, or [low, high]."""

    clip_range: ClipRange = 1e-4

    @property
    def _range(self) -> tuple[float, float]:
        return tuple(self.clip_range) if isinstance(self.clip_range, list) else (self.clip_range, self.clip_range)

    def loss(self, terms: objectives.Terms) -> torch.Tensor:
        """Loss (E,) of the edges, without the divergence."""
        return surrogate.clip_loss(self.ratio(terms), terms.advantage, *self._range)

    def clipped(self, terms: objectives.Terms) -> torch.Tensor:
        """Which edges (E,) the clip stops."""
        return surrogate.clipped(self.ratio(terms), terms.advantage, *self._range)

    def ratio(self, terms: objectives.Terms) -> torch.Tensor:
        """The ratio (E,) that is clipped."""
        return objectives.plain_ratio(terms)


class Clip(Clipped):
    """PPO's clipped ratio."""

    name: Literal["clip"] = "clip"


class NormalisedRatio(Clipped):
    """GRPO-Guard: a ratio of equal variance at every step, clipped; the loss is divided by the step's size."""

    name: Literal["normalised_ratio"] = "normalised_ratio"
    clip_range: ClipRange = 2e-6

    @property
    def needs_old_means(self) -> bool:
        """Whether the rollout must keep the means of its steps."""
        return True

    def ratio(self, terms: objectives.Terms) -> torch.Tensor:
        """The ratio (E,) that is clipped."""
        return objectives.normalised_ratio(terms)

    def pulls(self, steps: Sequence[objectives.TrainedStep], sigma_cap: float) -> list[float]:
        """How hard the loss of each of the trained steps pulls at the velocity: std / step size times the plain ratio's."""
        plain = super().pulls(steps, sigma_cap)
        return [
            size * slope(*step, sigma_cap)[1] / (step[1] - step[2]) for size, step in zip(plain, steps, strict=True)
        ]

    def loss(self, terms: objectives.Terms) -> torch.Tensor:
        """Loss (E,) of the edges, without the divergence."""
        return super().loss(terms) / terms.step_size


class SoftGate(PolicyGradient):
    """SAPO: a gate that closes softly instead of a clip.

    `temperature` is [for A > 0, for A <= 0]; its inverse plays the part of a clip range. The paper's ratios are of tokens
    and its temperatures 1.0 and 1.05; ours belong to averaged log-probabilities.
    """

    name: Literal["soft_gate"] = "soft_gate"
    temperature: Annotated[list[Positive], Field(min_length=2, max_length=2)] = [1.0e4, 1.05e4]

    def loss(self, terms: objectives.Terms) -> torch.Tensor:
        """Loss (E,) of the edges, without the divergence."""
        return surrogate.soft_gate_loss(objectives.plain_ratio(terms), terms.advantage, *self.temperature)

    def clipped(self, terms: objectives.Terms) -> torch.Tensor:
        """Which edges (E,) are stopped: none is."""
        return torch.zeros_like(terms.advantage, dtype=torch.bool)
