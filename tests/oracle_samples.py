"""Hold the gradient of each preset of final samples against its closed form (docs/oracle.md).

At the anchor the update is the mean of a times the gradient of the samples' log-likelihood, of which the expectation is an
integral over samples of the solver and over noise: both are Gaussian, so that it is a sum over a grid. Where samples are
compared by their ranks there is no such form, and only the direction is told.
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
GRID = torch.linspace(-7, 7, 401, dtype=torch.float64)
BATCHES, GROUPS = 20, 8
DENSITY = torch.exp(-(GRID**2) / 2) / torch.exp(-(GRID**2) / 2).sum()
DPM2_VARIANCE = 0.165453256253  # of its samples, by another program
# Noise levels of a density would lie between the steps, of which each has parameters of its own.
SCHEDULE = {"algorithm.likelihood.times": "schedule", "algorithm.likelihood.shift": 1.0}
SEED = {"run.seed": 2}


def sampler(kernel: Choice) -> tuple[float, float]:
    """Return mean and variance of the samples of chains, which have the kernel's noise at all steps."""
    if getattr(kernel, "solver", None) == "dpm2":
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


def expectation(run: Opened, reward: str) -> dict[int, Gradient] | None:
    """Return the expected signal of each step; None where samples are compared by rank."""
    algorithm = run.config.algorithm
    if algorithm.preset in RANKED:
        return None
    raw = algorithm.baseline.name == "none"
    factor = algorithm.baseline.scale * (1.0 if raw else 1 - 1 / run.config.train.group_size)
    if algorithm.objective.name == "group_sigmoid":
        factor /= 2  # the group is not told apart yet
    found, law = {}, sampler(algorithm.kernel)
    for i in range(len(SIGMAS) - 1):
        exact = expected(algorithm.likelihood.weight, law, i, reward=reward, centred=not raw)
        found[i] = Gradient(factor * exact.theta, factor * exact.phi)
    return found


def batch(run: Opened, reward: str, iteration: int) -> Seen:
    """Roll out, credit and score a batch at new noise, and take no step."""
    run.done, before = iteration, run.evaluations
    credited, field = credit(run, run.rollout(iteration, run.groups(iteration))), run.policy.modules["field"]
    step_in_place(run, credited)
    count = Counter(step_of(call.sigma) for call in credited.noised.calls for _ in call.draws)
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
    if preset not in ("awm", "awm_fast"):
        plain |= SCHEDULE
    with trainer(preset, reward, groups=groups, **{**plain, **SEED, **overrides}) as run:
        seen = [batch(run, reward, iteration) for iteration in range(batches)]
    return summary(preset, reward, seen, groups)
