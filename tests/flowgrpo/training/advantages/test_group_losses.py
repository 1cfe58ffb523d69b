import math
from itertools import product

import pytest
import torch

from flowgrpo.training.advantages.group_losses import contrast_loss, regression_loss, trust_loss

ADVANTAGE = torch.tensor([1.3, -0.4, 0.6, -1.5], dtype=torch.float64)
ADVANTAGE = (ADVANTAGE - ADVANTAGE.mean()) / ADVANTAGE.std(correction=0)
LOG_RATIO = torch.tensor([0.2, -0.7, 0.4, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("moved", [1.0, 1e-3, 50.0])
def test_a_regression_on_log_ratios_measures_their_correlation_alone(moved):
    """Of a group's z-scores the loss is 2 - 2 corr(A, rho), whatever the size and the mean of rho."""
    loss = regression_loss(moved * LOG_RATIO + 3, ADVANTAGE, scale=None, eps=1e-12)
    corr = torch.corrcoef(torch.stack([ADVANTAGE, LOG_RATIO]))[0, 1]
    assert loss.item() == pytest.approx(2 - 2 * corr.item())


@pytest.mark.parametrize("eps", [0.01, 0.5])
def test_the_first_gradient_of_a_regression_is_the_advantage_over_eps(eps):
    """Where nothing has moved it is -2 A / (G eps), and finite."""
    still = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(regression_loss(still, ADVANTAGE, scale=None, eps=eps), still)
    torch.testing.assert_close(slope, -2 * ADVANTAGE / (4 * eps))


@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_group_of_equals_teaches_a_regression_nothing(scale):
    """The prediction of a standardised group would have a gradient of rounding errors, which Adam makes a full step."""
    free = LOG_RATIO.clone().requires_grad_()
    (slope,) = torch.autograd.grad(regression_loss(free, torch.zeros(4), scale=scale, eps=0.01), free)
    assert slope.tolist() == [0.0] * 4


def test_a_regression_has_the_gradient_of_its_formula_with_that_of_the_std():
    free = LOG_RATIO.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda rho: regression_loss(rho, ADVANTAGE, scale=None, eps=0.1), free)
    (slope,) = torch.autograd.grad(regression_loss(free, ADVANTAGE, scale=None, eps=1e-12), free)
    assert (slope * (LOG_RATIO - LOG_RATIO.mean())).sum().item() == pytest.approx(0, abs=1e-9)  # no pull to a size


def test_a_regression_of_a_fixed_scale_has_a_finite_optimum():
    """Gradient descent ends at rho - mean rho = A / scale; the plain form has no minimum of a size."""
    free = LOG_RATIO.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = regression_loss(free, ADVANTAGE, scale=8.0, eps=9.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close((free - free.mean()).detach(), ADVANTAGE / 8, rtol=1e-6, atol=1e-9)
    value = regression_loss(LOG_RATIO, ADVANTAGE, scale=8.0, eps=9.0).item()
    by_hand = sum((a - 8 * (r - 0.0)) ** 2 for a, r in zip(ADVANTAGE.tolist(), LOG_RATIO.tolist(), strict=True)) / 4
    assert value == pytest.approx(by_hand)  # the mean of rho is 0


def contrast_slopes(score, good, temperature, rank=None):
    free, rank = score.clone().requires_grad_(), None if rank is None else torch.tensor(rank)
    loss = contrast_loss(free, torch.tensor(good, dtype=torch.bool), temperature=temperature, rank=rank)
    return loss.item(), torch.autograd.grad(loss, free)[0]


def test_a_contrast_by_hand():
    """Good samples pull alike, bad ones by exp(s / t)."""
    score = torch.tensor([0.2, -0.7, 0.4, 0.1], dtype=torch.float64)
    loss, slope = contrast_slopes(score, [1, 0, 1, 0], 0.5)
    bad = [math.exp(-0.7 / 0.5), math.exp(0.1 / 0.5)]
    assert loss == pytest.approx(-(0.3 - 0.5 * math.log(sum(bad) / 2)))
    assert slope.tolist() == pytest.approx([-0.5, bad[0] / sum(bad), -0.5, bad[1] / sum(bad)])


def test_a_hot_contrast_is_the_difference_of_means():
    """For t towards infinity, DisCO-b."""
    loss, slope = contrast_slopes(LOG_RATIO, [0, 1, 0, 0], 1e6)
    assert loss == pytest.approx(-(-0.7 - 0.7 / 3), abs=1e-6)
    assert slope.tolist() == pytest.approx([1 / 3, -1, 1 / 3, 1 / 3], abs=1e-6)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e3])
def test_a_contrast_without_a_temperature_does_not_depend_on_the_unit_of_scores(unit):
    """t is the standard deviation of the group's scores."""
    score = torch.tensor([0.2, -0.7, 0.4, 0.1], dtype=torch.float64)
    loss, slope = contrast_slopes(unit * score, [1, 0, 1, 0], None)
    by_hand = contrast_slopes(score, [1, 0, 1, 0], math.sqrt((0.2**2 + 0.7**2 + 0.4**2 + 0.1**2) / 4))
    assert loss == pytest.approx(unit * by_hand[0])
    torch.testing.assert_close(slope, by_hand[1])


def test_equal_scores_are_contrasted_alike_without_a_temperature():
    assert contrast_slopes(torch.full((4,), 3.0), [1, 0, 1, 0], None)[1].tolist() == [-0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.5, 0.9])
def test_a_contrast_weighs_prompts_alike_however_hard_they_are(chance):
    """All groups of four answers, each right by `chance`: the mean pull is the chance of both kinds, without p (1 - p).

    Two answers are possible, of scores ln p and ln(1 - p), so the pull of group means is p (1 - p) (G - 1) / G.
    """
    pull, plain = 0.0, 0.0
    for good in product([0, 1], repeat=4):
        weight = math.prod(chance if each else 1 - chance for each in good)
        mask = torch.tensor(good, dtype=torch.bool)
        score = torch.where(mask, math.log(chance), math.log(1 - chance)).double()
        _, slope = contrast_slopes(score, good, 10.0)
        pull -= weight * slope[mask].sum().item()
        assert slope.sum().item() == pytest.approx(0)
        plain += weight * (mask * (mask.double() - mask.double().mean())).mean().item()
    assert pull == pytest.approx(1 - chance**4 - (1 - chance) ** 4)
    assert plain == pytest.approx(chance * (1 - chance) * 3 / 4)


@pytest.mark.parametrize("good", [[0, 0, 0, 0], [1, 1, 1, 1]])
def test_a_group_of_one_kind_has_no_contrast(good):
    loss, slope = contrast_slopes(LOG_RATIO, good, 10.0)
    assert loss == 0
    assert slope.tolist() == [0.0] * 4


@pytest.mark.parametrize(("mean", "factor"), [(-0.3, 0.3 - 0.1), (-0.05, 0.0), (0.3, 0.0)])
def test_only_a_kl_above_its_limit_is_penalised(mean, factor):
    free = (LOG_RATIO + mean).requires_grad_()  # of mean 0
    loss = trust_loss(free, limit=0.1, penalty=7.0)
    assert loss.item() == pytest.approx(-7 * factor * mean)
    (slope,) = torch.autograd.grad(loss, free)
    assert slope.tolist() == pytest.approx([-7 * factor / 4] * 4)


def test_a_second_reward_ranks_the_good_and_no_bad_one():
    """DRPO: weights exp(rank) of the good, over their sum."""
    weights = [math.exp(3.0), math.exp(2.0), math.exp(5.0)]
    for of_bad in (-9.0, 0.0, 9.0, math.nan):
        _, slope = contrast_slopes(LOG_RATIO, [1, 0, 1, 1], 0.5, [3.0, of_bad, 2.0, 5.0])
        good = [-weight / sum(weights) for weight in weights]
        assert slope.tolist() == pytest.approx([good[0], 1.0, *good[1:]])


def test_equal_ranks_are_no_ranks_and_an_unknown_one_is_the_mean():
    plain = contrast_slopes(LOG_RATIO, [1, 0, 1, 1], 0.5)
    for rank in ([4.0] * 4, [math.nan] * 4, [4.0, 1.0, math.nan, 4.0]):
        loss, slope = contrast_slopes(LOG_RATIO, [1, 0, 1, 1], 0.5, rank)
        assert loss == pytest.approx(plain[0])
        torch.testing.assert_close(slope, plain[1])
    _, unknown = contrast_slopes(LOG_RATIO, [1, 0, 1, 1], 0.5, [3.0, 0.0, math.nan, 5.0])
    _, known = contrast_slopes(LOG_RATIO, [1, 0, 1, 1], 0.5, [3.0, 0.0, 4.0, 5.0])
    torch.testing.assert_close(unknown, known)
