"""Gaussian data N(m, s^2) with its exact velocity: what every kernel makes of it is known in closed form."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from samplers.kernels import Kernel, transition
from samplers.schedule import linear_sigmas

CASES = json.loads((Path(__file__).parents[1] / "data" / "gaussian_marginals.json").read_text())
SAMPLES = 200_000


def velocity(x, sigma, mean, std):
    """E[noise - x0 | x] where x = (1 - sigma) x0 + sigma noise."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    centred = x - (1 - sigma) * mean
    return sigma / variance * centred - (mean + (1 - sigma) * std**2 / variance * centred)


def steps(case):
    sigmas = linear_sigmas(case["num_steps"], case["shift"]).tolist()
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        last = i == case["num_steps"] - 1
        yield sigma, following, "ode" if last and case["last_step_ode"] else case["kernel"], sigmas[1]


def exact_moments(case):
    """A kernel's mean is linear in x here, so its slope and offset carry mean and variance through exactly."""
    mean, variance = 0.0, 1.0
    for sigma, following, kernel, cap in steps(case):
        x = torch.tensor([0.0, 1.0])
        v = velocity(x.double(), sigma, case["target_mean"], case["target_std"]).float()
        ((offset, at_one),), std = transition(Kernel(kernel, case["noise_level"]), (x,), (v,), sigma, following, cap)
        slope = (at_one - offset).item()
        mean, variance = slope * mean + offset.item(), slope**2 * variance + std**2
    return mean, math.sqrt(variance)


def name(case):
    return f"{case['kernel']}-{case['num_steps']}-shift{case['shift']}-std{case['target_std']}-{case['last_step_ode']}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_exact_recursion_of_every_kernel(case):
    mean, std = exact_moments(case)
    assert mean == pytest.approx(case["final_mean"], abs=2e-5)
    assert std == pytest.approx(case["final_std"], rel=2e-4, abs=2e-5)


SAMPLED = [c for c in CASES if c["shift"] == 3.0 and c["target_mean"] == 0.5 and c["last_step_ode"]]


@pytest.mark.parametrize("case", SAMPLED, ids=name)
def test_samples_have_the_exact_moments(case):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, generator=generator)
    for sigma, following, kernel, cap in steps(case):
        v = velocity(x, sigma, case["target_mean"], case["target_std"])
        (mean,), std = transition(Kernel(kernel, case["noise_level"]), (x,), (v,), sigma, following, cap)
        x = mean + std * torch.randn(SAMPLES, generator=generator) if std > 0 else mean
    error = case["final_std"] / math.sqrt(SAMPLES)
    assert abs(x.mean().item() - case["final_mean"]) < 4 * error
    assert abs(x.std().item() - case["final_std"]) < 4 * error / math.sqrt(2)


def final_std(kernel, num_steps, **wanted):
    wanted = {"shift": 3.0, "target_mean": 0.5, "last_step_ode": True, **wanted}
    (case,) = [
        c for c in CASES if c["kernel"] == kernel and c["num_steps"] == num_steps and wanted.items() <= c.items()
    ]
    return case["final_std"]


@pytest.mark.parametrize("kernel", ["ode", "flow_sde", "dance_sde"])
def test_marginal_preserving_kernels_tend_to_the_target(kernel):
    gaps = [abs(final_std(kernel, n) - 0.5) for n in (10, 40, 160)]
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]
    assert gaps[2] < 0.01


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("level", [0.5, 0.7])
def test_manifold_tends_to_the_target(shift, level):
    case = {"kernel": "manifold", "noise_level": level, "shift": shift, "last_step_ode": True}
    target = {"target_mean": 0.5, "target_std": 0.5}
    finals = [exact_moments({**case, **target, "num_steps": n}) for n in (10, 40, 160)]
    gaps = [abs(std - 0.5) for _, std in finals]
    assert [mean for mean, _ in finals] == pytest.approx([0.5] * 3, abs=1e-5)
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]
    assert gaps[2] < 0.01


def test_kernels_that_keep_the_coefficients_do_not_tend_to_the_target():
    assert final_std("cps", 160) < 0.4
    assert final_std("ddim_sde", 160) < 0.45
