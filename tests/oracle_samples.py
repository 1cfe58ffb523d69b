"""Hold the gradient of each preset of final samples against its closed form (docs/research/oracle.md).

At the anchor the update is the mean of a times the gradient of the samples' log-likelihood, of which the expectation is an
integral over samples of the solver and over noise: both are Gaussian, so that it is a sum over a grid. Where samples are
compared by their ranks, or in whole branch trees, there is no such form here, and only the direction is told.
"""

import math
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from field import credit, step_in_place
from gaussian_flow import MEAN, REWARDS, Gradient, moments, step, velocity, whole_gradient
from opened import Opened
from oracle import SIGMAS, Row, Seen, summary, trainer
from oracle import _step as step_of

from flowgrpo.flow.methods import sample_presets
from flowgrpo.flow.methods.likelihood import Elbo
from flowgrpo.schema.base import Choice

PRESETS = tuple(sample_presets.PRESETS)
RANKED = ("sft_best", "dpo", "seppo", "gdro")
OPEN = (*RANKED, "awm_tree", "awm_late", "awm_brush")  # without a closed form
SPLIT = 2  # the step of awm_split that is noisy, from which each start has two samples
GRID = torch.linspace(-7, 7, 401, dtype=torch.float64)
BATCHES, GROUPS = 20, 8
DENSITY = torch.exp(-(GRID**2) / 2) / torch.exp(-(GRID**2) / 2).sum()
DPM2_VARIANCE = 0.165453256253  # of its samples, by another program
# Noise levels of a density would lie between the steps, of which each has parameters of its own.
SCHEDULE = {"algorithm.likelihood.times": "schedule", "algorithm.likelihood.shift": 1.0}
SEED = {"run.seed": 2}


def sampler(kernel: Choice) -> tuple[float, float]:
    """Return mean and variance of the samples of chains, which have the kernel's noise at all steps."""
    if kernel.solver == "dpm2":
        return MEAN, DPM2_VARIANCE
    return moments([step(kernel.name, getattr(kernel, "level", 0.0), *pair, SIGMAS[1]) for pair in pairwise(SIGMAS)])


@cache
def expected(weight: str, law: tuple[float, float], index: int, *, reward: str, centred: bool) -> Gradient:
    """Return the mean of reward times the gradient of a sample's log-likelihood at a step of the schedule.

    `law` is mean and variance of the samples; `centred` takes the mean reward off.
    """
    likelihood, (mean, variance) = Elbo(weight=weight), law
    x0 = (mean + math.sqrt(variance) * GRID)[:, None]
    sigma, (slope, shift) = SIGMAS[index], velocity(SIGMAS[index])
    x = (1 - sigma) * x0 + sigma * GRID
    error = (slope * x + shift - (GRID - x0)).reshape(-1, 1).requires_grad_()
    (found,) = torch.autograd.grad(likelihood.log_prob(error, sigma).sum(), error)
    earned = REWARDS[reward](x0)
    density = (earned - centred * (earned[:, 0] * DENSITY).sum()) * DENSITY[:, None] * DENSITY
    of_theta = density * found.reshape(x.shape)
    return Gradient(float(of_theta.sum()), float((of_theta * x).sum()))


def between(t: float, s: float) -> tuple[float, float, float]:
    """Return what x_t takes of x0 and of x_s, and its std given both, by regression: x_s = a x_t + sqrt(s^2 - a^2 t^2) n."""
    a = (1 - s) / (1 - t)
    of_noised = (1 - t) ** 2 + t * t  # x0 ~ N(0, 1)
    given = torch.tensor([[1, 1 - s], [1 - s, (1 - s) ** 2 + s * s]], dtype=torch.float64)
    cross = torch.tensor([1 - t, a * of_noised], dtype=torch.float64)
    weights = torch.linalg.solve(given, cross)
    return *weights.tolist(), math.sqrt(max(of_noised - float(cross @ weights), 0.0))


@cache
def expected_of_split(weight: str, index: int, *, reward: str, size: int) -> Gradient:
    """Return the mean of advantage times the gradient of a sample's log-likelihood at a step, for `awm_split`.

    Two samples share the start and all states up to `SPLIT`; a group has `size` samples. States are linear in
    independent numbers: a constant, the start, the two samples' own noise, and that of the likelihood.
    """
    one = torch.eye(5, dtype=torch.float64)
    steps = [step("ode", 0.0, *pair, SIGMAS[1]) for pair in pairwise(SIGMAS)]
    steps[SPLIT] = step("flow_sde", 0.7, SIGMAS[SPLIT], SIGMAS[SPLIT + 1], SIGMAS[1])
    shared = one[1]
    for each in steps[:SPLIT]:
        shared = each.slope * shared + each.shift * one[0]
    ends = []
    for own in (one[2], one[3]):
        state = shared
        for each in steps[SPLIT:]:
            state = each.slope * state + each.shift * one[0] + each.noise * own
        ends.append(state)
    sigma, (slope, shift) = SIGMAS[index], velocity(SIGMAS[index])
    noised = (1 - sigma) * ends[0] + sigma * one[4]
    if index >= SPLIT:
        of_clean, of_shared, std = between(sigma, SIGMAS[SPLIT])
        noised = of_clean * ends[0] + of_shared * shared + std * one[4]
    table = torch.stack([ends[0], noised, ends[1]])
    mean, spread = table[:, 0], table[:, 1:] @ table[:, 1:].T
    scale, common = spread[0, 0].sqrt(), spread[0, 1] / spread[0, 0].sqrt()
    x0 = (mean[0] + scale * GRID)[:, None]
    x = mean[1] + common * GRID[:, None] + (spread[1, 1] - common**2).sqrt() * GRID
    weights = torch.linalg.solve(spread[:2, :2], spread[:2, 2])
    sibling = mean[2] + weights[0] * (x0 - mean[0]) + weights[1] * (x - mean[1])
    uncertain = spread[2, 2] - weights @ spread[:2, 2]
    earned = REWARDS[reward](x0)
    by_sibling = REWARDS[reward](sibling) - (uncertain if reward == "quadratic" else 0.0)
    usual = (earned[:, 0] * DENSITY).sum()
    if index < SPLIT:
        advantage = (earned + by_sibling) / 2 - usual
    else:
        advantage = (earned - (by_sibling + (size - 2) * usual) / (size - 1)) / 2 + (earned - by_sibling) / 2
    error = (slope * x + shift - (x - x0) / sigma).reshape(-1, 1).requires_grad_()
    (found,) = torch.autograd.grad(Elbo(weight=weight).log_prob(error, sigma).sum(), error)
    of_theta = advantage * found.reshape(x.shape) * DENSITY[:, None] * DENSITY
    return Gradient(float(of_theta.sum()), float((of_theta * x).sum()))


def expectation(run: Opened, reward: str) -> dict[int, Gradient] | None:
    """Return the expected signal of each step; None where no closed form is known."""
    algorithm = run.config.algorithm
    if algorithm.preset in OPEN:
        return None
    raw = algorithm.baseline.name == "none"
    factor = algorithm.baseline.scale * (1.0 if raw else 1 - 1 / run.config.train.group_size)
    if algorithm.objective.name == "group_sigmoid":
        factor /= 2  # the group is not told apart yet
    found, law = {}, sampler(algorithm.kernel)
    if algorithm.preset == "awm_split":
        weight, size = algorithm.likelihood.weight, run.config.train.group_size
        exact = [expected_of_split(weight, i, reward=reward, size=size) for i in range(len(SIGMAS) - 1)]
        scale = algorithm.baseline.scale
        return {i: Gradient(scale * each.theta, scale * each.phi) for i, each in enumerate(exact)}
    for i in range(len(SIGMAS) - 1):
        exact = expected(algorithm.likelihood.weight, law, i, reward=reward, centred=not raw)
        found[i] = Gradient(factor * exact.theta, factor * exact.phi)
    return found


def batch(run: Opened, reward: str, iteration: int) -> Seen:
    """Roll out, credit and score a batch at new noise, and take no step."""
    run.done, before = iteration, run.evaluations
    credited, field = credit(run, run.rollout(iteration, run.groups(iteration))), run.policy.modules["field"]
    step_in_place(run, credited)
    count = Counter(step_of(draw.sigma) for call in credited.noised.calls for draw in call.draws)
    total = sum(count.values())
    ode = [step("ode", 0.0, *pair, SIGMAS[1]) for pair in pairwise(SIGMAS)]
    noisy = [step("flow_sde", 0.7, *pair, SIGMAS[1]) for pair in pairwise(SIGMAS[:-1])] + ode[-1:]
    return Seen(
        signal={
            i: Gradient(*(float(-p.grad[i]) * total / n for p in (field.theta, field.phi))) for i, n in count.items()
        },
        exact=expectation(run, reward),
        weight={i: n / total for i, n in count.items()},
        chain=whole_gradient(noisy, reward),
        ode=whole_gradient(ode, reward),
        evaluations=(run.evaluations - before) / run.config.train.groups,
    )


def row(preset: str, reward: str, batches: int = BATCHES, *, groups: int = GROUPS, **overrides: Any) -> Row:
    baseline = sample_presets.PRESETS[preset]["baseline"]
    plain: dict[str, Any] = {} if "std" in baseline else {"algorithm.baseline": {**baseline, "clip": 1e9}}
    if preset not in ("awm", "awm_fast", "awm_split", "awm_tree", "awm_late", "awm_brush"):
        plain |= SCHEDULE
    with trainer(preset, reward, groups=groups, **{**plain, **SEED, **overrides}) as run:
        seen = [batch(run, reward, iteration) for iteration in range(batches)]
    return summary(preset, reward, seen, groups)
