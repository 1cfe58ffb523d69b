import math
from dataclasses import replace

import pytest
import torch

from flowgrpo.objectives import KL, Terms, clip_loss, clipped, plain_ratio
from samplers.kernels import flow_sde


def terms(log_ratio, advantage, **others):
    log_ratio, advantage = torch.tensor(log_ratio), torch.tensor(advantage)
    old = torch.full_like(log_ratio, -1.5)
    zeros = (torch.zeros(len(log_ratio), 4),)
    default = Terms(old + log_ratio, old, advantage, zeros, torch.tensor(0.5), 0.1, zeros)
    return replace(default, **others)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "stopped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.0 * 1.3, True),  # a good edge gains nothing beyond 1 + high
        (0.5, 2.0, -2.0 * 0.5, False),  # but is pulled back up from below
        (1.5, -2.0, 2.0 * 1.5, False),  # a bad edge is pushed down from above
        (0.5, -2.0, 2.0 * 0.9, True),  # and not below 1 - low
        (0.5, 0.0, 0.0, False),
    ],
)
def test_the_clip_is_asymmetric_and_pessimistic(ratio, advantage, loss, stopped):
    case = terms([math.log(ratio)], [advantage])
    assert clip_loss(plain_ratio(case), case.advantage, 0.1, 0.3).item() == pytest.approx(loss)
    assert clipped(plain_ratio(case), case.advantage, 0.1, 0.3).item() is stopped


@pytest.mark.parametrize(("log_ratio", "advantage"), [(0.0, 1.0), (0.5, 1.0), (-0.5, 1.0), (0.5, -1.0), (-0.5, -1.0)])
def test_what_is_called_clipped_has_no_gradient(log_ratio, advantage):
    log_prob = torch.tensor([log_ratio], requires_grad=True)
    case = replace(terms([0.0], [advantage]), log_prob=log_prob, old_log_prob=torch.zeros(1))
    (slope,) = torch.autograd.grad(clip_loss(plain_ratio(case), case.advantage, 0.2, 0.2).sum(), log_prob)
    assert (slope.item() == 0) is clipped(plain_ratio(case), case.advantage, 0.2, 0.2).item()


def test_kl_forms_on_one_flow_sde_step():
    """With mean(mu) = x (...) + v (-h - a^2 h / 2) the divergences are multiples of the squared velocity gap."""
    x, v, reference = torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5)
    sigma, after, level = 0.6, 0.5, 0.7
    h, g = sigma - after, level * math.sqrt(sigma / (1 - sigma))
    mean, std = flow_sde(x, v, sigma, after, level, 0.9)
    other, _ = flow_sde(x, reference, sigma, after, level, 0.9)
    case = terms([0.0] * 3, [0.0] * 3, mean=(mean,), std=std, step_size=h, velocity=(v,))
    case = replace(case, reference_mean=(other,), reference_velocity=(reference,))
    gap = ((v - reference) ** 2).mean(1)
    slope = h * (1 + level**2 / 2)
    torch.testing.assert_close(KL["velocity"](case), gap)
    torch.testing.assert_close(KL["flow_grpo"](case), gap * slope**2 / (2 * g**2), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(KL["exact"](case), gap * slope**2 / (2 * g**2 * h), rtol=1e-4, atol=1e-6)


def test_exact_kl_is_the_divergence_of_two_gaussians():
    a, b, std = torch.randn(2, 6), torch.randn(2, 6), torch.tensor(0.3)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(a, std), torch.distributions.Normal(b, std)
    ).mean(1)
    case = terms([0.0] * 2, [0.0] * 2, mean=(a,), std=std, reference_mean=(b,))
    torch.testing.assert_close(KL["exact"](case), expected)
