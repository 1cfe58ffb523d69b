"""Likelihoods: the log-probabilities of a trajectory's steps, or a bound on the log-likelihood of its final sample.

`trajectory` scores the steps of the rollout. `elbo` adds fresh noise to the final sample. The weighted squared error of
the velocity at the noised sample is minus a bound on the final sample's log-likelihood. So any deterministic solver may
roll out, and only final samples are kept, with the states at which trees split.

Let x = (1 - sigma) x0 + sigma noise, target = noise - x0 and e = v - target. Let E be the mean of e^2 over a sample's
dimensions. For an exact velocity, the integral over sigma of E (1 - sigma) / sigma, averaged over noise, is minus the
log-likelihood per dimension, up to a constant. This is the weight `exact`; the others do not give the log-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice, Count, Positive
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.readable import counted
from flowgrpo.training.weights.old_policies import Bank, Decay

if TYPE_CHECKING:
    import numpy as np

    from samplers import noise
    from samplers.kernels import State
    from samplers.trees import Move, Plan
else:
    np = lazy("numpy")
    noise = lazy("samplers.noise")

PolicyName = Literal["live", "old", "reference", "bank"]
SMALLEST = 1e-5  # smallest divisor of an adaptive weight
LEAST = 1e-3  # smallest sigma drawn from a density
TABLE = 1000  # noise levels of the model's training, the grid of logit_normal sigmas
SOFT = 1e-10  # added to the squared error in huber and power


def flatten_state(state: State) -> Tensor:
    """Return all tensors of a state as one float32 tensor (B, D)."""
    return torch.cat([x.float().flatten(1) for x in state], dim=1)


def weighted_error(weight: str, error: Tensor, sigma: float | Tensor, power: float) -> Tensor:
    """Return the weighted squared errors (B,) of velocity errors (B, D) at `sigma`, a number or a tensor (B,).

    AWM (arXiv 2509.25050) has sigma (`t` in its code), huber and power (`ghuber`, used for its results). DiffusionNFT
    (2509.16117) and the study of likelihoods (2602.04663) have adaptive, with which all noise levels and samples weigh
    alike. CRD (2603.14128) has adaptive_velocity. The divisors of both adaptive weights have no gradient.
    """

    def rounded(factor: float | Tensor) -> float | Tensor:
        return factor.to(error) if isinstance(factor, torch.Tensor) else factor

    sigma = sigma.double() if isinstance(sigma, torch.Tensor) else sigma  # as Python computes with one number
    square = error.square().mean(1)
    match weight:
        case "velocity":
            return square
        case "sigma":
            return rounded(sigma) * square
        case "x0":
            return rounded(sigma**2) * square
        case "exact":
            return rounded((1 - sigma) / sigma) * square
        case "huber":
            return rounded(sigma) * ((square + SOFT).sqrt() - math.sqrt(SOFT))
        case "power":
            return rounded(sigma / power) * ((square + SOFT) ** power - SOFT**power)
    size = error.detach().abs().double().mean(1).to(error)
    if weight == "adaptive":
        return rounded(sigma**2) * square / (rounded(sigma) * size).clamp(min=SMALLEST)
    return square / size.clamp(min=SMALLEST)


def bridge_moments(sigma: float, shared_sigma: float) -> tuple[float, float, float]:
    """Return the weights of the clean sample and of a shared state in the mean of a noised state, and its std.

    With x_t = (1 - t) x0 + t noise, the state at t = `sigma`, given x0 and an earlier state x_s of the same path
    (s = `shared_sigma` >= t), is Gaussian. Let a = (1 - s) / (1 - t) and V = s^2 - a^2 t^2. Then

        mean = [(1 - t) V x0 + a t^2 x_s] / s^2,   variance = t^2 V / s^2

    At t = s it is x_s, at t = 0 it is x0, and for s = 1 it is the noised sample without a bridge.
    """
    t, s = sigma, shared_sigma
    a = 1.0 if t == s else (1 - s) / (1 - t)
    variance = max(s * s - (a * t) ** 2, 0.0)
    return (1 - t) * variance / s**2, a * t * t / s**2, t * variance**0.5 / s


class Likelihood(Choice):
    """Options of every likelihood."""

    def plan(self, plan: Plan) -> Plan:
        """Return the plan of a rollout, with only those moves marked as trained that the update replays."""
        return plan

    @property
    def policies(self) -> set[str]:
        """Return the names of the policies that the likelihood needs besides the live one."""
        return set()


class Trajectory(Likelihood):
    """The log-probability of each step of the rollout under the kernel's Gaussian noise."""

    name: Literal["trajectory"] = "trajectory"


class Elbo(Likelihood):
    """A bound on the log-likelihood of the final sample, from fresh noise; a rollout keeps only the states that split."""

    name: Literal["elbo"] = "elbo"
    draws: Count | None = None
    """Noise levels at which each sample is scored in the update; null: one less than the number of `steps`."""
    times: Literal["schedule", "strata", "uniform", "logit_normal"] = "schedule"
    """How noise levels are drawn. schedule: steps of the sampler's schedule, without repeats; strata: the schedule is
    cut into `draws` runs of steps, and one step is drawn from each; uniform: in sigma; logit_normal: in sigma, on the
    1,000 levels of the model's training."""
    steps: list[int] | None = Field(None, min_length=2, max_length=2)
    """[first, end) of the schedule's steps to draw from; uniform draws between their sigmas. A negative end counts back
    from the schedule's end. null: all."""
    shift: Positive = 1.0
    """Shift of uniform and logit_normal sigmas towards noise: s becomes shift s / (1 + (shift - 1) s)."""
    noise: Literal["fresh", "group"] = "fresh"
    """fresh: new noise for every sample and noise level; group: the samples of a group share noise and noise levels."""
    antithetic: bool = False
    """Score each noise level twice, with the noise and with its negative. The part of the gradient that is linear in
    the noise cancels. The update needs twice the evaluations."""
    weight: Literal["velocity", "sigma", "x0", "exact", "adaptive", "adaptive_velocity", "huber", "power"] = "adaptive"
    """Weight of the squared error of the velocity; see `weighted_error`."""
    power: float = Field(0.25, gt=0, le=1)
    """Exponent of the weight `power`."""
    sampler: PolicyName = "live"
    """The policy that rolls out."""
    anchor: PolicyName = "old"
    """The policy in the ratio's denominator; live: the ratio is 1."""
    old: Decay = Decay()
    """How the old policy follows the live one."""
    bridge: bool = True
    """In trees that split, draw the noised state below a split given both the sample and the state that siblings share
    (see `bridge_moments`); false: given the sample alone, as above the first split."""
    bank: Bank = Bank()
    """Which earlier snapshots of the live policy are kept. Each iteration draws one of them as the policy `bank`."""

    @model_validator(mode="after")
    def _means_something(self) -> Elbo:
        if self.times in ("schedule", "strata") and self.shift != 1:
            raise InputError(
                f"algorithm.likelihood.shift: {self.times} draws the sampler's own sigmas, take times=uniform, "
                "times=logit_normal or shift=1"
            )
        if self.times == "logit_normal" and self.steps is not None:
            raise InputError("algorithm.likelihood.steps: logit_normal draws from all sigmas, take uniform or no steps")
        if self.shift != 1 and self.steps is not None:
            raise InputError("algorithm.likelihood.steps: shifted sigmas are drawn from all, take shift=1 or no steps")
        return self

    @override
    def plan(self, plan: Plan) -> Plan:
        def moves(role: str, step: int) -> Sequence[Move]:
            return [replace(move, trained=False) for move in plan(role, step)]

        return moves

    @property
    @override
    def policies(self) -> set[str]:
        names: set[str] = {self.sampler, self.anchor}
        return names - {"live"}

    def log_prob(self, error: Tensor, sigma: float | Tensor) -> Tensor:
        """Return minus the weighted error (B,) of velocity minus target (B, D), in place of a log-probability.

        `sigma` is a number or a tensor (B,).
        """
        return -weighted_error(self.weight, error, sigma, self.power)

    def sigmas(self, schedule: Sequence[float], *address: Any) -> list[float]:
        """Return the noise levels of one sample's or group's draws; `address` as in `samplers.noise.generator`."""
        random = noise.generator(*address)
        first, end = self.span(len(schedule) - 1)
        draws = self.draws or max(end - first - 1, 1)
        if self.times == "schedule":
            return [schedule[first + int(i)] for i in random.permutation(end - first)[:draws]]
        if self.times == "strata":
            edges = [first + (end - first) * i // draws for i in range(draws + 1)]
            return [schedule[int(random.integers(edges[i], edges[i + 1]))] for i in range(draws)]
        if self.times == "uniform":
            unshifted = schedule[end] + (schedule[first] - schedule[end]) * random.random(draws)
        else:
            unshifted = np.ceil(TABLE / (1 + np.exp(-random.standard_normal(draws)))) / TABLE
        drawn = self.shift * unshifted / (1 + (self.shift - 1) * unshifted)
        return [max(float(sigma), LEAST) for sigma in drawn.astype(np.float32)]

    def span(self, num_steps: int) -> tuple[int, int]:
        """Return the range [first, end) of steps to draw from; raise InputError if the schedule is too short."""
        first, end = self.steps or (0, num_steps)
        end = end + num_steps if end < 0 else end
        draws = (self.draws or 1) if self.times in ("schedule", "strata") else 1
        schedule = f"{counted(num_steps, 'step')} (model.call.num_inference_steps)"
        fewer = f" algorithm.likelihood.draws={num_steps}" if draws > num_steps else ""
        if not 0 <= first < end <= num_steps:
            raise InputError(
                f"algorithm.likelihood.steps: {self.steps} are no range of {schedule}; set "
                f"algorithm.likelihood.steps=null{fewer}"
            )
        if draws > end - first and self.steps:
            raise InputError(
                f"algorithm.likelihood.steps: {self.steps} leave {end - first} of {schedule}, too few for {draws} "
                f"draws without repeats; set algorithm.likelihood.steps=null{fewer}"
            )
        if draws > num_steps:
            raise InputError(
                f"algorithm.likelihood.draws: {draws} without repeats are too many for {schedule}; set{fewer}"
            )
        return first, end
