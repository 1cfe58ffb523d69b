import math

import pytest
import torch

from flowgrpo.training.advantages.baseline import Beta, beta_weights, group_mean


def binary(*successes, size=4):
    """Values of groups of so many successes, and their sets."""
    values = [float(i < each) for each in successes for i in range(size)]
    sets = [[i] for i in range(len(successes)) for _ in range(size)]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(sets)


@pytest.mark.parametrize("bound", [None, 5.0])
def test_rates_near_all_or_nothing_leave_the_deviation(bound):
    """Their variance, above 1/4, makes both parameters 1."""
    values, sets = binary(1, 7, size=8)
    found = Beta(bound=bound).relative(values, sets, None)
    torch.testing.assert_close(found, group_mean(values, sets, std="none"))


def test_rates_of_a_third_of_that_variance_are_divided_by_the_std_of_the_group():
    """Mean 1/2 and variance 1/16 make both parameters 3/2: 1 / density is pi / (8 sqrt(p (1 - p)))."""
    values, sets = binary(1, 2, 3)
    found = Beta(bound=None).relative(values, sets, None)
    torch.testing.assert_close(found, group_mean(values, sets, std="group", eps=0.0) * math.pi / 8)
    weight = [1 / math.sqrt(p * (1 - p)) for p in (0.25, 0.5, 0.75)]
    mean = sum(weight) / 3
    bounded = Beta(bound=5.0).relative(values, sets, None)  # each is inside the bound, and their mean is made 1
    assert bounded[[0, 4, 8]].tolist() == pytest.approx(
        [each / mean * gap for each, gap in zip(weight, (0.75, 0.5, 0.25), strict=True)]
    )


def test_weights_are_those_of_the_beta_distribution_of_torch():
    p = torch.tensor([0.1, 0.15, 0.3, 0.35, 0.2], dtype=torch.float64)
    mean, variance = p.mean(), p.var(correction=1)
    a, b = ((mean * (1 - mean) / variance - 1) * each for each in (mean, 1 - mean))
    density = torch.distributions.Beta(1 + a / 3, 1 + b / 3).log_prob(p).exp()
    torch.testing.assert_close(beta_weights(p), 1 / density)
    assert beta_weights(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))[2] == 1e6  # its density is 0


def test_the_bound_holds_where_one_group_lies_far_from_others():
    values = 0.5 + 0.001 * torch.arange(128, dtype=torch.float64).sin()
    values[:2] += 0.1
    sets = torch.arange(128)[:, None] // 2
    plain = group_mean(values, sets, std="none")
    unbound, bound = (Beta(bound=each).relative(values, sets, None) / plain for each in (None, 5.0))
    assert unbound.max() / unbound.min() > 1000
    assert bound.mean() == pytest.approx(1)
    assert bound.max() / bound.min() == pytest.approx(5 / unbound.min().clamp(min=0.2).item())


@pytest.mark.parametrize(("apart", "most"), [(1e-16, 1.0), (1e-7, 1.0), (1e-5, 1e-4)])
def test_rates_that_hardly_differ_have_finite_weights(apart, most):
    """From a std of 1e-6 on a weight is about the std, since the density is about 1 over it."""
    weights = beta_weights(0.3 + apart * torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    assert ((weights > apart) & (weights <= most)).all()


@pytest.mark.parametrize("bound", [None, 5.0])
def test_sets_of_one_rate_are_compared_without_weights(bound):
    values, sets = binary(2, 2)
    assert Beta(bound=bound).relative(values, sets, None).tolist() == [0.5, 0.5, -0.5, -0.5] * 2
    assert Beta(bound=bound).relative(values[:4], sets[:4], None).tolist() == [0.5, 0.5, -0.5, -0.5]


def test_a_lost_value_and_equal_values_teach_nothing():
    values, sets = binary(1, 2, 3, 0)
    values[[1, 13]] = math.nan
    found = Beta().relative(values, sets, None)
    assert found[[1, 12, 13, 14, 15]].tolist() == [0] * 5
    kept = torch.tensor([i for i in range(16) if i not in (1, 13)])
    torch.testing.assert_close(found[kept], Beta().relative(values[kept], sets[kept], None))


def test_rewards_are_read_between_the_worst_and_the_best():
    values, sets = binary(1, 2, 3)
    shifted = Beta(worst=-2.0, best=8.0).relative(10 * values - 2, sets, None)
    torch.testing.assert_close(shifted, Beta().relative(values, sets, None))
    outside = Beta().relative(10 * values - 2, sets, None)  # their means count as 0 or 1
    assert outside.isfinite().all()
