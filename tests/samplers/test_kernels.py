import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gaussian_flow import step
from scipy.integrate import quad

from samplers.kernels import (
    KERNELS,
    ODE,
    Kernel,
    cps,
    ddim_sde,
    flow_sde,
    log_prob,
    manifold_sde,
    pull,
    slope,
    transition,
)
from samplers.schedule import linear_sigmas

NOISY = ["flow_sde", "dance_sde", "cps", "ddim_sde", "manifold"]
CASES = json.loads((Path(__file__).parents[1] / "data" / "sde_steps.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kernel']}-{c['noise_level']}-{c['num_steps']}-{c['step']}")
def test_step_and_log_prob_equal_the_reference_implementations(case):
    x, v, following, mean = (
        torch.tensor(case[k]).reshape(case["shape"]) for k in ("sample", "velocity", "next_sample", "mean")
    )
    form = "constant_free" if case["kernel"] == "cps" else "mean"
    kernel = Kernel(case["kernel"], case["noise_level"], form)
    (ours,), std = transition(kernel, (x,), (v,), case["sigma"], case["sigma_next"], case["sigma_after_first"])
    torch.testing.assert_close(ours, mean, rtol=1e-5, atol=1e-6)
    assert std == pytest.approx(case["std"], rel=1e-5)
    expected = torch.tensor(case["log_prob"])
    torch.testing.assert_close(log_prob((following,), (mean,), std, form), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.9), (0.75, 2 / 3), (0.25, 0.0)])
def test_mean_depends_on_velocity_as_derived(name, sigma, sigma_next):
    level, cap = 0.7, 0.9
    x, v = torch.randn(2, 5), torch.randn(2, 5, requires_grad=True)
    (mean,), std = transition(Kernel(name, level), (x,), (v,), sigma, sigma_next, cap)
    (derivative,) = torch.autograd.grad(mean.sum(), v)
    if name == "ddim_sde":
        drawn = level * sigma_next * math.sqrt(1 - (cap if sigma == 1 else sigma))
        expected = -sigma * (1 - sigma_next) + (1 - sigma) * math.sqrt(sigma_next**2 - drawn**2)
    else:
        known = step(name, level, sigma, sigma_next, cap)  # the papers' formulas, written again
        expected, drawn = known.push, known.noise
    assert std == pytest.approx(drawn, rel=1e-5)
    assert derivative.flatten().tolist() == pytest.approx([expected] * 10, rel=1e-5, abs=1e-6)
    assert slope(Kernel(name, level), sigma, sigma_next, cap) == pytest.approx((expected, std), rel=1e-5)
    assert expected < 0


def test_a_step_to_zero_is_deterministic_where_coefficients_are_kept_and_finite_elsewhere():
    for name in NOISY:
        step = KERNELS[name](0.25, 0.0, 0.7, 0.9)
        assert all(map(math.isfinite, step))
        assert (step.std == 0) == (name in ("cps", "ddim_sde"))
    assert KERNELS["cps"](0.25, 0.0, 0.7, 0.9) == pytest.approx((1, -0.25, 0))  # the predicted clean sample


def test_a_step_from_pure_noise_uses_the_second_sigma_in_its_place():
    assert flow_sde(1.0, 0.9, 0.7, 0.9).std == pytest.approx(0.7 * math.sqrt(1 / (1 - 0.9)) * math.sqrt(0.1))
    assert ddim_sde(1.0, 0.9, 0.7, 0.9).std == pytest.approx(0.7 * 0.9 * math.sqrt(1 - 0.9))
    assert flow_sde(1.0, 0.9, 0.7, 1.0).std == math.inf


def test_ddim_sde_is_cps_of_another_angle():
    """eta sqrt(1 - sigma) = sin(level pi / 2): the same step, parametrised otherwise."""
    sigma, following, eta = 0.6, 0.45, 0.8
    level = math.asin(eta * math.sqrt(1 - sigma)) * 2 / math.pi
    step = ddim_sde(sigma, following, eta, 0.9)
    assert step == pytest.approx(cps(sigma, following, level, 0.9))
    assert step.std == pytest.approx(eta * following * math.sqrt(1 - sigma))


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("form", ["mean", "sum", "constant_free"])
def test_a_pull_is_the_size_of_the_gradient_at_the_velocity(name, form):
    """By autograd, over 20,000 dimensions of one draw each: its root mean square is that of `pull` times xi."""
    generator, size = torch.Generator().manual_seed(3), 20_000
    x, v = torch.randn(2, 1, size, generator=generator).unbind()
    v.requires_grad_(True)
    kernel = Kernel(name, 0.7, form)
    (mean,), std = transition(kernel, (x,), (v,), 0.75, 0.6, 0.9)
    following = mean.detach() + std * torch.randn(1, size, generator=generator)
    (gradient,) = torch.autograd.grad(log_prob((following,), (mean,), std, form).sum(), v)
    over = 1 if form == "sum" else size
    assert gradient.square().mean().sqrt().item() * over == pytest.approx(pull(kernel, 0.75, 0.6, 0.9), rel=0.02)


def manifold_std(sigma, sigma_next, level):
    return manifold_sde(sigma, sigma_next, level, 0.9).std


@pytest.mark.parametrize(("sigma", "sigma_next"), [(0.99, 0.95), (0.99, 0.98), (0.9, 0.5), (0.75, 2 / 3), (0.25, 0.0)])
def test_manifold_integrates_its_diffusion_over_the_step(sigma, sigma_next):
    variance, _ = quad(lambda s: 0.7**2 * s / (1 - s), sigma_next, sigma)
    assert manifold_std(sigma, sigma_next, 0.7) == pytest.approx(math.sqrt(variance), rel=1e-5)


def test_manifold_differs_from_flow_sde_as_published():
    sigmas = linear_sigmas(20, shift=5.0).tolist()
    manifold, flow = (
        [kernel(*step, 0.5, sigmas[1]).std for step in pairwise(sigmas)] for kernel in (manifold_sde, flow_sde)
    )
    assert [manifold[i] for i in (0, 1, 4, -1)] == pytest.approx([0.5555, 0.4256, 0.2535, 0.0795], abs=5e-5)
    assert [flow[i] for i in (0, 1, 4, -1)] == pytest.approx([0.5, 0.5186, 0.2728, 0.1171], abs=5e-5)


@pytest.mark.parametrize("width", [1.0, 0.5, 0.1, 1e-3, 1e-4, 1e-5])
def test_manifold_steps_from_pure_noise_as_if_from_0997_and_finely_from_the_middle(width):
    """ln((1 - sigma_next) / (1 - middle)) is ln 2, however fine the step; with 0.997 the variance would be negative."""
    begin = 0.003 if width > 0.006 else width / 2
    expected = 0.7 * math.sqrt(math.log(width / begin) - width)
    assert manifold_std(1.0, 1.0 - width, 0.7) == pytest.approx(expected, rel=1e-5 if width > 0.006 else 2e-3)


def test_manifold_is_random_at_every_fine_step_near_pure_noise():
    fine = torch.linspace(1, 0.99, 201, dtype=torch.float64).tolist()
    assert all(0 < manifold_std(*step, 0.7) < 1 for step in pairwise(fine))


def test_forms_of_log_prob_agree_with_torch_distributions():
    mean, following, std = torch.randn(3, 2, 4), torch.randn(3, 2, 4), 0.3
    joint = torch.distributions.Normal(mean, std).log_prob(following).flatten(1)
    torch.testing.assert_close(log_prob((following,), (mean,), std, "mean"), joint.mean(1))
    torch.testing.assert_close(log_prob((following,), (mean,), std, "sum"), joint.double().sum(1))
    free = log_prob((following,), (mean,), std, "constant_free")
    torch.testing.assert_close(free, -((following - mean) ** 2).flatten(1).mean(1))


def test_log_prob_is_joint_over_the_tensors_of_a_state():
    video, audio = torch.randn(2, 3, 4), torch.randn(2, 5)
    means = torch.zeros(2, 3, 4), torch.zeros(2, 5)
    half = 0.5
    together = log_prob((video, audio), means, half, "sum")
    apart = log_prob((video,), means[:1], half, "sum") + log_prob((audio,), means[1:], half, "sum")
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(log_prob((video, audio), means, half, "mean"), together.float() / 17)


def test_a_sum_over_millions_of_dimensions_keeps_small_differences():
    """Half a square over 2.1 million dimensions, against the same in numpy's float64; float32 is off by hundredths."""
    size, std = 2_097_152, 0.3
    error = (std * torch.randn(2, size, generator=torch.Generator().manual_seed(1))).numpy()
    mean = torch.zeros(1, size)
    found = [log_prob((torch.from_numpy(row[None]),), (mean,), std, "sum").item() for row in error]
    wide = error.astype("float64")
    expected = (wide[1] ** 2 - wide[0] ** 2).sum() / (2 * std**2)
    assert found[0] - found[1] == pytest.approx(expected, abs=1e-6)


def test_a_deterministic_step_has_log_prob_zero_and_does_not_pull():
    x = (torch.randn(2, 3),)
    mean, std = transition(ODE, x, x, 0.5, 0.25, 0.9)
    assert log_prob(mean, mean, std).tolist() == [0.0, 0.0]
    assert pull(Kernel("cps", 0.8), 0.25, 0.0, 0.9) == 0


@pytest.mark.parametrize("name", NOISY)
def test_a_kernel_that_is_said_to_diffuse_has_half_the_std_in_a_quarter_of_the_step(name):
    kernel = Kernel(name, 0.5)
    long, short = (slope(kernel, 0.6, 0.6 - step, 0.9)[1] for step in (0.2, 0.05))
    assert (short == pytest.approx(long / 2, rel=1e-5)) == kernel.diffuses


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("form", ["mean", "constant_free"])
def test_a_long_row_scores_alone_what_it_scores_among_others(threads, form):
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    drawn, mean = torch.randn(2, 5, 2**16, generator=generator)
    torch.set_num_threads(threads)
    try:
        together = log_prob((drawn,), (mean,), 0.5, form)
        alone = [log_prob((drawn[i : i + 1],), (mean[i : i + 1],), 0.5, form) for i in range(5)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))
