"""Kernels: the coefficients of one step, and the log-probabilities of steps.

Convention (diffusers): x = (1 - sigma) x0 + sigma noise, sigma runs from 1 (noise) to 0 (data), the model predicts the
velocity v = noise - x0. Then x0 = x - sigma v and noise = x + (1 - sigma) v, and a step has dt = sigma_next - sigma < 0.

The mean of a step is a x + b v, and its standard deviation is a number. So a kernel is a function of numbers,
`(sigma, sigma_next, level, sigma_cap) -> Step(a, b, std)`, computed in float64. `sigma_cap` replaces sigma in 1 - sigma
where sigma > 0.999: the schedule's second sigma, as in flow_grpo.

No coefficient depends on the model, so the gradient flows through the mean alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

Tensor = torch.Tensor
SHARED = 2**15  # row length from which torch may split a sum over threads
State = tuple[Tensor, ...]  # one latent tensor (B, ...), or several with the same B (video and audio)


class Step(NamedTuple):
    """The law of a step: mean `of_x` x + `of_v` v, standard deviation `std`."""

    of_x: float
    of_v: float
    std: float


def ode(sigma: float, sigma_next: float, level: float, sigma_cap: float) -> Step:
    """Return an Euler step of the probability-flow ODE, x + v dt, for any `level` and `sigma_cap`."""
    return Step(1.0, sigma_next - sigma, 0.0)


def flow_sde(sigma: float, sigma_next: float, level: float, sigma_cap: float) -> Step:
    """Return a step of Flow-GRPO's reverse SDE (arXiv 2505.05470, eq. 9), diffusion g = level sqrt(sigma / (1 - sigma)).

    With few steps, a stochastic last step leaves residual noise. The std is infinite only if `sigma_cap` is 1.
    """
    kept = 1 - (sigma_cap if sigma > 0.999 else sigma)
    return _reverse_sde(sigma, sigma_next, level**2 * sigma / kept if kept else math.inf)


def dance_sde(sigma: float, sigma_next: float, level: float, sigma_cap: float) -> Step:
    """Return a step of DanceGRPO's reverse SDE (arXiv 2505.07818), diffusion g = level. `sigma_cap` has no effect."""
    return _reverse_sde(sigma, sigma_next, level**2)


def cps(sigma: float, sigma_next: float, level: float, sigma_cap: float) -> Step:
    """Return a step of coefficients-preserving sampling (arXiv 2509.05952), which mixes predicted and fresh noise.

    `level` in [0, 1] is an angle: std = sigma_next sin(level pi / 2). If the data are a single point, the total noise
    after every step is exactly sigma_next. The noise of a step does not shrink with more steps, so samples do *not*
    converge to the data's distribution: for level 0.8, Gaussian data of std 0.5 are sampled with std 0.352 in 10 steps
    and 0.398 in 160.
    """
    angle = level * math.pi / 2
    return _kept_coefficients(sigma, sigma_next, math.sin(angle), math.cos(angle))


def ddim_sde(sigma: float, sigma_next: float, level: float, sigma_cap: float) -> Step:
    """Return a step of Stepwise-Flow-GRPO's SDE (arXiv 2603.28718): `cps` with std = level sigma_next sqrt(1 - sigma).

    `level` in [0, 1] is DDIM's eta. The share of fresh noise, level sqrt(1 - sigma), grows from step to step. In the
    paper it is 0 at sigma 1, so that step could not be trained; here `sigma_cap` replaces sigma there, as in `flow_sde`
    (ours). As with `cps`, samples do not converge to the data's distribution: for level 0.8, Gaussian data of std 0.5
    are sampled with std 0.407 in 10 steps and 0.452 in 160.
    """
    new = level * math.sqrt(1 - (sigma_cap if sigma > 0.999 else sigma))
    return _kept_coefficients(sigma, sigma_next, new, math.sqrt(1 - new**2))


def manifold_sde(sigma: float, sigma_next: float, level: float, sigma_cap: float) -> Step:
    """Return a step of SAGE-GRPO (arXiv 2603.21872): Flow-GRPO's SDE with the noise variance integrated over the step.

    The variance is the integral of g^2 = level^2 s / (1 - s) over the step, in place of g^2 |dt|:

        level^2 [ln((1 - sigma_next) / (1 - sigma)) - (sigma - sigma_next)]

    At the same level this is less noise than `flow_sde` at every step but the first, where it is more if sigma_next is
    below about 0.99. The integral diverges at sigma = 1. There the released code uses 0.997; we use the larger of 0.997
    and the middle of the step.
    `sigma_cap` has no effect.
    """
    begin = min(sigma, max((1 + sigma_next) / 2, 0.997))
    variance = level**2 * (math.log((1 - sigma_next) / (1 - begin)) - (sigma - sigma_next))
    pulled = variance / (2 * sigma)
    return Step(1 - pulled, sigma_next - sigma - pulled * (1 - sigma), math.sqrt(max(variance, 0.0)))


def _reverse_sde(sigma: float, sigma_next: float, variance_rate: float) -> Step:
    """Return a step of dx = [v + g^2 / (2 sigma) noise] dt + g dw; g^2 is `variance_rate`, -noise / sigma the score."""
    dt = sigma_next - sigma
    ratio = variance_rate / (2 * sigma)
    return Step(1 + ratio * dt, (1 + ratio * (1 - sigma)) * dt, math.sqrt(variance_rate * -dt))


def _kept_coefficients(sigma: float, sigma_next: float, new: float, old: float) -> Step:
    """Return a step to (1 - sigma_next) x0 + sigma_next (old noise + new xi), with fresh xi and old^2 + new^2 = 1."""
    of_x0, of_noise = 1 - sigma_next, sigma_next * old
    return Step(of_x0 + of_noise, of_noise * (1 - sigma) - of_x0 * sigma, sigma_next * new)


KERNELS: dict[str, Callable[[float, float, float, float], Step]] = {
    "ode": ode,
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
    "cps": cps,
    "ddim_sde": ddim_sde,
    "manifold": manifold_sde,
}


PRESERVING = ("cps", "ddim_sde")


@dataclass(frozen=True)
class Kernel:
    """A kernel with its noise level and the form of its log-probability (a key of `LOG_PROBS`).

    An `ode` step of `order` 2 also uses the clean estimate of the step before it; see `samplers.second_order`.
    """

    name: str = "ode"
    level: float = 0.0
    log_prob: str = "mean"
    order: int = 1

    @property
    def label(self) -> str:
        """Return name and level as text."""
        if self.stochastic:
            return f"{self.name} {self.level:g}"
        return "dpm2" if self.order == 2 else self.name

    @property
    def stochastic(self) -> bool:
        """Return whether the step is random, and so has a log-probability to train on."""
        return self.name != "ode" and self.level > 0

    @property
    def preserves(self) -> bool:
        """Return whether steps preserve the flow's coefficients. Then level is at most 1 and a step to sigma 0 has std 0."""
        return self.name in PRESERVING

    @property
    def diffuses(self) -> bool:
        """Return whether the std is g sqrt(sigma - sigma_next), with a diffusion coefficient g."""
        return self.name in ("flow_sde", "dance_sde")


ODE, DPM2 = Kernel(), Kernel(order=2)


def default_log_prob(kernel: str) -> str:
    """Return the form of the log-probability that a kernel was released with.

    The noise of `cps` and `ddim_sde` shrinks with sigma: with `mean` their last steps would outweigh all others.
    """
    return "constant_free" if kernel in PRESERVING else "mean"


def transition(
    kernel: Kernel, state: State, velocity: State, sigma: float, sigma_next: float, sigma_cap: float
) -> tuple[State, float]:
    """Return mean (float32, shaped like `state`) and std of one step of `kernel`."""
    of_x, of_v, std = KERNELS[kernel.name](sigma, sigma_next, kernel.level, sigma_cap)
    mean = tuple(of_x * x.float() + of_v * v.float() for x, v in zip(state, velocity, strict=True))
    return mean, std


def slope(kernel: Kernel, sigma: float, sigma_next: float, sigma_cap: float) -> tuple[float, float]:
    """Return d mean / d v and std of one step."""
    step = KERNELS[kernel.name](sigma, sigma_next, kernel.level, sigma_cap)
    return step.of_v, step.std


def pull(kernel: Kernel, sigma, sigma_next, sigma_cap) -> float:
    """Return the size of the gradient of one step's log-probability with respect to the velocity, for a typical draw.

    For an error std xi with normal xi, an element of the gradient is slope xi / std for `sum`, slope xi / (std D) for
    `mean` with D dimensions, and 2 slope std xi / D for `constant_free`. Return the absolute factor of xi without 1 / D;
    return 0 if std is 0.
    """
    moved, std = slope(kernel, sigma, sigma_next, sigma_cap)
    if std == 0:
        return 0.0
    return abs(moved) * (2 * std if kernel.log_prob == "constant_free" else 1 / std)


def mean_square(error: Tensor) -> Tensor:
    """Return the mean square of each row (B, D) -> (B,), bit for bit independent of the other rows.

    On a CPU, torch splits a single long row over its threads, but gives whole rows to threads if there are several. The
    two round differently, so long rows are averaged one by one.
    """
    squares = error.square()
    if squares.device.type != "cpu" or squares.shape[1] < SHARED:
        return squares.mean(1)
    return torch.stack([row.mean() for row in squares])


def mean_log_prob(error: Tensor, std: float) -> Tensor:
    """Return the Gaussian log-density (B,) of `error` (B, D), averaged over D, as is usual in the field."""
    return -mean_square(error) / (2 * std**2) - (math.log(std) + 0.5 * math.log(2 * math.pi))


def sum_log_prob(error: Tensor, std: float) -> Tensor:
    """Return the Gaussian log-density (B,) of `error` (B, D), summed over D, in float64.

    Clip ranges must be D times larger than for `mean`. In float32, log ratios would be off by hundredths.
    """
    constant = math.log(std) + 0.5 * math.log(2 * math.pi)
    return -error.double().square().sum(1) / (2 * std**2) - error.shape[1] * constant


def constant_free_log_prob(error: Tensor, std: float) -> Tensor:
    """Return -mean(error^2) (B,), the form that CPS was released with.

    It is `mean` times 2 std^2, up to a constant, so a clip range means something else at each step.
    """
    return -mean_square(error)


LOG_PROBS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "mean": mean_log_prob,
    "sum": sum_log_prob,
    "constant_free": constant_free_log_prob,
}


def log_prob(next_state: State, mean: State, std: float, form: str = "mean") -> Tensor:
    """Return the log-probability (B,) of `next_state` under N(mean, std^2), over all tensors of the state.

    `form` is a key of `LOG_PROBS`; `sum` gives float64, others float32. Only `mean` receives a gradient. A step of std
    0 has no density and is never trained: its log-probability is 0 by convention, with gradient 0 if `mean` is finite.
    """
    errors = [(x.detach().float() - m).flatten(1) for x, m in zip(next_state, mean, strict=True)]
    error = errors[0] if len(errors) == 1 else torch.cat(errors, dim=1)
    return LOG_PROBS[form](error, std) if std > 0 else 0.0 * LOG_PROBS[form](error, 1.0)
