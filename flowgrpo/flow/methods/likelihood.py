"""What the policy makes more or less likely: the steps of a trajectory, or its final sample.

`trajectory` is the log-probability of the steps that were walked. `elbo` noises the final sample again: at noise levels and
with noise of the update's own, the error of the velocity is minus a bound on the sample's log-likelihood, so that a rollout
may be deterministic, by any solver, and keeps nothing but where it ended.

With x = (1 - sigma) x0 + sigma noise, target = noise - x0 and error e = v - target, E = mean e^2 over a sample's dimensions.
The mean over noise of the integral of (1 - sigma) / sigma E over sigma is the KL of a sample's own law from the model's, so
`exact` is the weight of the true log-likelihood of an exact velocity, and the others weigh noise levels otherwise.
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
SMALLEST = 1e-5  # that an adaptive weight divides by
LEAST = 1e-3  # sigma that is drawn from a density
TABLE = 1000  # steps of training, on which logit_normal sigmas lie
SOFT = 1e-10  # under the roots of the Huber forms


def flattened(state: State) -> Tensor:
    """All tensors of a state as one float32 tensor (B, D)."""
    return torch.cat([x.float().flatten(1) for x in state], dim=1)


def velocity_error(error: Tensor, sigma: float, power: float) -> Tensor:
    """E itself."""
    return error.square().mean(1)


def sigma_error(error: Tensor, sigma: float, power: float) -> Tensor:
    """E times sigma (AWM's `t`)."""
    return sigma * error.square().mean(1)


def x0_error(error: Tensor, sigma: float, power: float) -> Tensor:
    """The squared error of the clean estimate, sigma^2 E."""
    return sigma**2 * error.square().mean(1)


def exact_error(error: Tensor, sigma: float, power: float) -> Tensor:
    """(1 - sigma) / sigma E, the weight of the true log-likelihood."""
    return (1 - sigma) / sigma * error.square().mean(1)


def adaptive_error(error: Tensor, sigma: float, power: float) -> Tensor:
    """The squared error of the clean estimate over its mean absolute error, which has no gradient.

    DiffusionNFT (arXiv 2509.16117) and the study of likelihoods (2602.04663): all noise levels and samples weigh alike.
    """
    return x0_error(error, sigma, power) / (sigma * _size(error)).clamp(min=SMALLEST)


def adaptive_velocity_error(error: Tensor, sigma: float, power: float) -> Tensor:
    """E over the mean absolute error, which has no gradient (CRD, arXiv 2603.14128)."""
    return error.square().mean(1) / _size(error).clamp(min=SMALLEST)


def huber_error(error: Tensor, sigma: float, power: float) -> Tensor:
    """sigma sqrt(E), rounded off at 0 (AWM, arXiv 2509.25050)."""
    return sigma * ((error.square().mean(1) + SOFT).sqrt() - math.sqrt(SOFT))


def power_error(error: Tensor, sigma: float, power: float) -> Tensor:
    """sigma E^power / power, rounded off at 0 (AWM's `ghuber`, with which its results were made)."""
    return sigma / power * ((error.square().mean(1) + SOFT) ** power - SOFT**power)


def _size(error: Tensor) -> Tensor:
    return error.detach().abs().double().mean(1).to(error)


ERRORS = {
    "velocity": velocity_error,
    "sigma": sigma_error,
    "x0": x0_error,
    "exact": exact_error,
    "adaptive": adaptive_error,
    "adaptive_velocity": adaptive_velocity_error,
    "huber": huber_error,
    "power": power_error,
}


class Likelihood(Choice):
    """What every choice has."""

    def plan(self, plan: Plan) -> Plan:
        """What a rollout does of a plan; by default all of it."""
        return plan

    @property
    def policies(self) -> set[str]:
        """The policies beside the live one that it asks for."""
        return set()


class Trajectory(Likelihood):
    """The log-probability of the steps that the rollout walked, by the kernel's noise."""

    name: Literal["trajectory"] = "trajectory"


class Elbo(Likelihood):
    """A bound on the log-likelihood of the final sample, which is noised again; nothing of the trajectory is kept."""

    name: Literal["elbo"] = "elbo"
    draws: Count | None = None
    """Noise levels at which each sample is scored in the update; null: one less than the steps that are drawn from."""
    times: Literal["schedule", "strata", "uniform", "logit_normal"] = "schedule"
    """schedule: steps of the sampler's own schedule, without repeats; strata: one of each of as many runs of them; uniform
    in sigma; logit_normal in sigma, on the 1,000 steps of training."""
    steps: list[int] | None = Field(None, min_length=2, max_length=2)
    """[first, end) of the schedule's steps that are drawn from (of uniform: between their sigmas), an end below 0 counted
    from the schedule's; null: all."""
    shift: Positive = 1.0
    """Shift of logit_normal sigmas towards noise: s becomes shift s / (1 + (shift - 1) s)."""
    noise: Literal["fresh", "group"] = "fresh"
    """fresh for every sample and noise level; group: the samples of a group share it, and the noise levels."""
    antithetic: bool = False
    """Score each noise level with the noise and with its negative: the part of the gradient's noise that is linear in it
    cancels, for twice the update's evaluations."""
    weight: Literal["velocity", "sigma", "x0", "exact", "adaptive", "adaptive_velocity", "huber", "power"] = "adaptive"
    """Weight of the squared error of the velocity; see the module."""
    power: float = Field(0.25, gt=0, le=1)
    """Exponent of the weight `power`."""
    sampler: PolicyName = "live"
    """The policy that rolls out."""
    anchor: PolicyName = "old"
    """The policy in the ratio's denominator; live: the ratio is 1."""
    old: Decay = Decay()
    """How the old policy follows the live one."""
    bank: Bank = Bank()
    """Which earlier snapshots of the live policy are kept; of them an iteration draws the policy `bank`."""

    @model_validator(mode="after")
    def _means_something(self) -> Elbo:
        if self.times != "logit_normal" and self.shift != 1:
            raise InputError(
                "algorithm.likelihood.shift: it shifts logit_normal sigmas, take times=logit_normal or shift=1"
            )
        if self.times == "logit_normal" and self.steps is not None:
            raise InputError("algorithm.likelihood.steps: logit_normal draws from all sigmas, take uniform or no steps")
        return self

    @override
    def plan(self, plan: Plan) -> Plan:
        """The same moves, of which none is kept for the update."""

        def moves(role: str, step: int) -> Sequence[Move]:
            return [replace(move, trained=False) for move in plan(role, step)]

        return moves

    @property
    @override
    def policies(self) -> set[str]:
        asked: set[str] = {self.sampler, self.anchor}
        return asked - {"live"}

    def log_prob(self, error: Tensor, sigma: float) -> Tensor:
        """Minus the weighted error (B,), in place of a log-probability.

        Args:
            error: (B, D) velocity minus target.
        """
        return -ERRORS[self.weight](error, sigma, self.power)

    def sigmas(self, schedule: Sequence[float], *address: Any) -> list[float]:
        """The noise levels of a sample's draws, or of a group's.

        Args:
            schedule: of the sampler, from noise to 0.
            address: of the draw, see `samplers.noise`.

        Raises:
            InputError: the schedule has fewer steps than are asked for.
        """
        random = noise.generator(*address)
        first, end = self.span(len(schedule) - 1)
        draws = self.draws or max(end - first - 1, 1)
        if self.times == "schedule":
            return [schedule[first + int(i)] for i in random.permutation(end - first)[:draws]]
        if self.times == "strata":
            edges = [first + (end - first) * i // draws for i in range(draws + 1)]
            return [schedule[int(random.integers(edges[i], edges[i + 1]))] for i in range(draws)]
        if self.times == "uniform":
            drawn = schedule[end] + (schedule[first] - schedule[end]) * random.random(draws)
        else:
            unshifted = np.ceil(TABLE / (1 + np.exp(-random.standard_normal(draws)))) / TABLE
            drawn = self.shift * unshifted / (1 + (self.shift - 1) * unshifted)
        return [max(float(sigma), LEAST) for sigma in drawn.astype(np.float32)]

    def span(self, num_steps: int) -> tuple[int, int]:
        """The first step that is drawn from, and the end of them.

        Raises:
            InputError: there are no such steps, or fewer than are to be drawn.
        """
        first, end = self.steps or (0, num_steps)
        end = end + num_steps if end < 0 else end
        if not 0 <= first < end <= num_steps:
            raise InputError(
                f"algorithm.likelihood.steps: {self.steps} are not steps of the schedule, take [0, {num_steps}] or less"
            )
        if self.times in ("schedule", "strata") and (self.draws or 1) > end - first:
            raise InputError(
                f"algorithm.likelihood.draws: {self.draws} of {end - first} steps cannot be drawn without repeats, take "
                f"{end - first} or less, or times=uniform"
            )
        return first, end
