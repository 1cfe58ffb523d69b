"""A flow of two Gaussians with exact rewards and gradients, as sums over a grid, for chains, ODE and brushes.

The velocity is exact, plus a shift theta_i at each step i, all 0. A trapezoid sum of what falls off like a Gaussian is exact
to many digits. Nothing here calls the project's samplers, which are held against it.
"""

import math
from collections.abc import Callable, Sequence

import torch
from gaussian_flow import Step, schedule

Tensor = torch.Tensor
Earned = Callable[[Tensor], Tensor]
WEIGHTS, MEANS, STDS = (0.4, 0.6), (-1.0, 1.2), (0.35, 0.5)
REWARDS: dict[str, Earned] = {"quadratic": lambda x: -((x - 2) ** 2), "soft": lambda x: torch.sigmoid(4 * (x - 0.5))}
GRID = torch.linspace(-9, 9, 601, dtype=torch.float64)  # of states
XI = torch.linspace(-9, 9, 121, dtype=torch.float64)  # of noise
SIGMAS = schedule()


def velocity(x: Tensor, sigma: float) -> Tensor:
    """Return the exact velocity at states of any shape: the mean of noise minus data."""
    weights, velocities = [], []
    for weight, mean, std in zip(WEIGHTS, MEANS, STDS, strict=True):
        variance = (1 - sigma) ** 2 * std**2 + sigma**2
        centred = x - (1 - sigma) * mean
        weights.append(math.log(weight) - centred**2 / (2 * variance) - math.log(variance) / 2)
        velocities.append((sigma - (1 - sigma) * std**2) / variance * centred - mean)
    return (torch.stack(weights).softmax(0) * torch.stack(velocities)).sum(0)


def moved(step: Step, x: Tensor) -> Tensor:
    return step.carry * x + step.push * velocity(x, step.sigma)


def followed(steps: Sequence[Step], x: Tensor) -> Tensor:
    for each in steps:
        x = moved(each, x)
    return x


def normal(x: Tensor, std: float = 1.0) -> Tensor:
    return torch.exp(-((x / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))


def of_ode(steps: Sequence[Step], earned: Earned) -> tuple[float, list[float]]:
    """Return what ODE samples earn, and its gradient by the shift of each step."""
    shifts = torch.zeros(len(steps), dtype=torch.float64, requires_grad=True)
    x = GRID
    for each, shift in zip(steps, shifts, strict=True):
        x = moved(each, x) + each.push * shift
    reward = (normal(GRID) * earned(x)).sum() * _spacing(GRID)
    (found,) = torch.autograd.grad(reward, shifts)
    return reward.item(), found.tolist()


def of_chain(steps: Sequence[Step], earned: Earned) -> tuple[float, list[float]]:
    """Return what a chain earns whose last step alone is ODE, and its gradient by the shift of each noisy step."""
    width = _spacing(GRID)
    kernels = [normal(GRID - moved(each, GRID)[:, None], each.noise) * width for each in steps[:-1]]
    value, values = earned(moved(steps[-1], GRID)), []
    for kernel in reversed(kernels):
        values.append(value)
        value = kernel @ value
    density, found = normal(GRID) * width, []
    for each, kernel, after in zip(steps, kernels, reversed(values), strict=False):
        score = (GRID - moved(each, GRID)[:, None]) * each.push / each.noise**2
        found.append((density @ (kernel * score) @ after).item())
        density = density @ kernel
    return (normal(GRID) * width * value).sum().item(), found


def of_branches(
    steps: Sequence[Step], ode: Sequence[Step], earned: Earned, trunk: Sequence[tuple[Tensor, Tensor]]
) -> list[float]:
    """Differentiate what ODE steps behind each noisy step earn by its shift; `trunk` has states and weights before it."""
    found = []
    for i, (each, (x, weight)) in enumerate(zip(steps[:-1], trunk, strict=True)):
        ends = followed(ode[i + 1 :], moved(each, x)[:, None] + each.noise * XI)
        slope = (earned(ends) * (XI * normal(XI))).sum(1) * _spacing(XI) * each.push / each.noise
        found.append((weight * slope).sum().item())
    return found


def ode_trunk(ode: Sequence[Step]) -> list[tuple[Tensor, Tensor]]:
    """Return states of ODE samples before each step but the last, and their weights."""
    weight = normal(GRID) * _spacing(GRID)
    return [(followed(ode[:i], GRID), weight) for i in range(len(ode) - 1)]


def chain_trunk(steps: Sequence[Step]) -> list[tuple[Tensor, Tensor]]:
    """Return states of a chain before each noisy step, and their weights."""
    weight, found = normal(GRID) * _spacing(GRID), []
    for each in steps[:-1]:
        found.append((GRID, weight))
        weight = weight @ (normal(GRID - moved(each, GRID)[:, None], each.noise) * _spacing(GRID))
    return found


def _spacing(grid: Tensor) -> float:
    return (grid[1] - grid[0]).item()
