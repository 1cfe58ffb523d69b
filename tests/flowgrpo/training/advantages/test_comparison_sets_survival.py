"""Advantages of chains that were not stopped, against the enumeration of all draws."""

import itertools
import math

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.training.advantages.baseline import GroupMean, LeaveOneOut, leave_one_out
from flowgrpo.training.advantages.comparison_sets import Survival, complete, weighted_leave_one_out

VALUES = torch.tensor([1.0, 4.0, 10.0, 3.0, 6.0], dtype=torch.float64)
FORETOLD = torch.tensor([2.0, 3.0, 7.0, 5.0, 6.0], dtype=torch.float64)
CHANCES = torch.tensor([0.25, 0.5, 1.0, 0.75, 0.4], dtype=torch.float64)
SCORES = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 1.0], [2.0, 0.25], [-3.0, -1.0]], dtype=torch.float64)
ONE = torch.zeros(5, 1, dtype=torch.long)


def draws():
    """All 2^5 outcomes with their probabilities."""
    for alive in itertools.product((False, True), repeat=5):
        alive = torch.tensor(alive)
        yield alive, float(torch.where(alive, CHANCES, 1 - CHANCES).prod())


def expected(gradient):
    """The mean over all draws of a gradient (2,) that depends on who survived."""
    return sum(chance * gradient(alive) for alive, chance in draws())


@pytest.mark.parametrize("foretold", [FORETOLD, torch.zeros(5).double(), torch.full((5,), math.nan).double()])
def test_the_mean_over_all_draws_is_the_gradient_of_all_chains(foretold):
    def weighted(alive):
        weight = torch.where(alive, 1 / CHANCES, 0.0)
        values = VALUES.where(alive, math.nan)
        return (weight * weighted_leave_one_out(values, ONE, weight, foretold)) @ SCORES / 5

    torch.testing.assert_close(expected(weighted), leave_one_out(VALUES, ONE) @ SCORES / 5, rtol=0, atol=1e-14)


def test_the_survivors_own_mean_is_biased():
    def plain(alive):
        if alive.sum() < 2:
            return torch.zeros(2).double()
        return leave_one_out(VALUES[alive], ONE[alive]) @ SCORES[alive] / alive.sum()

    exact = leave_one_out(VALUES, ONE) @ SCORES / 5
    assert ((expected(plain) - exact).abs() > 0.2 * exact.abs()).all()


def test_a_good_prediction_lowers_the_variance():
    def spread(foretold):
        def squared(alive):
            weight = torch.where(alive, 1 / CHANCES, 0.0)
            found = weighted_leave_one_out(VALUES.where(alive, math.nan), ONE, weight, foretold)
            return (((weight * found) @ SCORES / 5 - leave_one_out(VALUES, ONE) @ SCORES / 5) ** 2).sum()

        return float(expected(squared))

    assert spread(VALUES) < spread(FORETOLD) < spread(torch.zeros(5).double())


def test_completed_rewards_have_the_mean_of_the_rewards():
    def completed(alive):
        weight = torch.where(alive, 1 / CHANCES, 0.0)
        return complete(VALUES.where(alive, math.nan), weight, FORETOLD)

    torch.testing.assert_close(expected(completed), VALUES)


def test_a_lost_reward_is_left_out_and_a_lone_one_has_no_advantage():
    values = torch.tensor([1.0, math.nan, math.nan, 3.0, 9.0], dtype=torch.float64)
    weight = torch.tensor([2.0, 0.0, 4.0, 1.0, 2.0], dtype=torch.float64)
    sets = torch.tensor([[0], [0], [0], [0], [1]])
    found = weighted_leave_one_out(values, sets, weight, FORETOLD).tolist()
    first = 2 + 2 * (1 - 2)  # the estimates of the others are 3, foretold, and 3, with weight 1
    assert found == pytest.approx([1 - (3 + 3) / 2, 0, 0, 3 - (first + 3) / 2, 0])


def test_baselines_other_than_leave_one_out_refuse_and_columns_are_added():
    values = torch.stack([VALUES, VALUES.flip(0)], 1)
    foretold = torch.stack([FORETOLD, FORETOLD.flip(0)], 1)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    survival = Survival(torch.tensor([2.0, 1.0, 0.0, 1.0, 4.0]).double(), foretold)
    values[2] = math.nan
    by_sum, by_column = (
        LeaveOneOut(clip=1e9, combine=combine).advantages(values, weights, ONE, survival=survival)
        for combine in ("sum", "per_reward")
    )
    torch.testing.assert_close(by_sum, by_column)
    with pytest.raises(
        InputError, match=r"^algorithm\.baseline: algorithm\.tree\.stop is without bias by leave_one_out"
    ):
        GroupMean().advantages(values, weights, ONE, survival=survival)
