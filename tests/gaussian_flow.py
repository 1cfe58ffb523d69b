"""A flow whose expected reward and whose gradient are known exactly, for any sampler: one Gaussian number.

Data are N(mean, std^2), and the velocity is the exact one of their law, k x + b, plus a shift theta_i and a slope phi_i at
each step i, 0 unless a step says otherwise. Every kernel's step is x' = carry x + push v + noise xi, so that means and
variances are products and sums: nothing here calls the project's samplers, which are held against it.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from operator import mul
from statistics import NormalDist

MEAN, STD = 0.7, 0.5  # of the data
THRESHOLD = 1.2  # above which a sample is a success
REWARDS = {"linear": lambda x: x, "quadratic": lambda x: -((x - 2) ** 2), "success": lambda x: (x > THRESHOLD) * 1.0}


def schedule(steps: int = 10, shift: float = 3.0) -> list[float]:
    """Return sigmas from 1 to 1 / steps, evenly, shifted as SD3's are; and 0."""
    plain = [1 - i / steps for i in range(steps)]
    return [shift * s / (1 + (shift - 1) * s) for s in plain] + [0.0]


@dataclass(frozen=True)
class Step:
    """x' = carry x + push v + noise xi, from sigma to the next.

    `theta` and `phi` are added to the velocity's shift and slope; `heat` scales the drawn noise; `mean` and `std` are the
    data's.
    """

    sigma: float
    carry: float
    push: float
    noise: float
    _: KW_ONLY
    theta: float = 0.0
    phi: float = 0.0
    heat: float = 1.0
    mean: float = MEAN
    std: float = STD

    @cached_property
    def slope(self) -> float:
        """How x' moves with x, the velocity included."""
        return self.carry + self.push * (velocity(self.sigma, self.mean, self.std)[0] + self.phi)

    @cached_property
    def shift(self) -> float:
        """What x' is at x = 0 without noise."""
        return self.push * (velocity(self.sigma, self.mean, self.std)[1] + self.theta)


@dataclass(frozen=True)
class Gradient:
    """Derivatives of the expected reward by the shift and by the slope of a step."""

    theta: float
    phi: float


def velocity(sigma: float, mean: float = MEAN, std: float = STD) -> tuple[float, float]:
    """Slope k and shift b of the exact velocity of N(mean, std^2)."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    slope = (sigma - (1 - sigma) * std**2) / variance
    return slope, -mean * (1 + slope * (1 - sigma))


def step(kernel: str, level: float, sigma: float, after: float, cap: float) -> Step:
    """Build a step of a kernel of `samplers.kernels` by its formula there, written again.

    `cap` stands in for sigma 1 where `flow_sde` divides by 1 - sigma.
    """
    size = sigma - after
    if kernel == "ode" or level == 0:
        return Step(sigma, 1.0, -size, 0.0)
    if kernel == "cps":
        angle = level * math.pi / 2
        kept = after * math.cos(angle)
        return Step(sigma, 1 - after + kept, -sigma * (1 - after) + (1 - sigma) * kept, after * math.sin(angle))
    if kernel == "flow_sde":
        variance = level**2 * sigma / (1 - (cap if sigma == 1 else sigma)) * size
    elif kernel == "dance_sde":
        variance = level**2 * size
    else:
        begin = min(sigma, max(0.997, (1 + after) / 2))
        variance = level**2 * (math.log((1 - after) / (1 - begin)) - size)
    half = variance / (2 * sigma)
    return Step(sigma, 1 - half, -size - half * (1 - sigma), math.sqrt(variance))


def moments(steps: Sequence[Step]) -> tuple[float, float]:
    """Return mean and variance after some steps from standard noise."""
    mean, variance = 0.0, 1.0
    for each in steps:
        mean = each.slope * mean + each.shift
        variance = each.slope**2 * variance + (each.heat * each.noise) ** 2
    return mean, variance


def expected(steps: Sequence[Step], reward: str) -> float:
    mean, variance = moments(steps)
    if reward == "linear":
        return mean
    if reward == "quadratic":
        return -((mean - 2) ** 2 + variance)
    return NormalDist(mean, math.sqrt(variance)).cdf(2 * mean - THRESHOLD)


def derivatives(mean: float, variance: float, reward: str) -> tuple[float, float]:
    """Differentiate the expected reward of a Gaussian by its mean and by its variance."""
    if reward == "linear":
        return 1.0, 0.0
    if reward == "quadratic":
        return -2 * (mean - 2), -1.0
    density = NormalDist(mean, math.sqrt(variance)).pdf(THRESHOLD)
    return density, density * (THRESHOLD - mean) / (2 * variance)


def gradient(before: Sequence[Step], own: Step, after: Sequence[Step], reward: str) -> Gradient:
    """Differentiate the expected reward by the parameters of one step, between those before and after it.

    It is also the mean of reward times the gradient of the step's log-probability, whatever the other kernels.
    """
    mean, variance = moments(before)
    follows = math.prod(each.slope for each in after)
    of_mean, of_variance = derivatives(*moments([*before, own, *after]), reward)
    theta = of_mean * own.push * follows
    return Gradient(theta, theta * mean + 2 * of_variance * own.slope * own.push * variance * follows**2)


def whole_gradient(steps: Sequence[Step], reward: str) -> list[Gradient]:
    """Differentiate the expected reward by the parameters of every step."""
    return [gradient(steps[:i], steps[i], steps[i + 1 :], reward) for i in range(len(steps))]


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    product, *squares = (sum(map(mul, a, b)) for a, b in ((left, right), (left, left), (right, right)))
    return product / math.sqrt(math.prod(squares))
