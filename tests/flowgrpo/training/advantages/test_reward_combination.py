"""How several rewards of a sample become one: the worst, a cautious mean, or what the baseline adds."""

import math

import pytest
import torch

from flowgrpo.training.advantages.baseline import GroupMean, LeaveOneOut
from flowgrpo.training.advantages.reward_combination import Combination, cautious, worst
from rewards import Reward

NAN = math.nan
ROWS = torch.tensor([[1.0, 2.0, 6.0], [-4.0, NAN, 2.0], [NAN, 5.0, NAN], [NAN, NAN, NAN]], dtype=torch.float64)


def of(form, weights=(1.0, 1.0, 1.0), offsets=(0.0, 0.0, 0.0), caution=0.1):
    pairs = zip(weights, offsets, strict=True)
    rewards = [Reward(f"r{i}", len, weight, offset=offset) for i, (weight, offset) in enumerate(pairs)]
    options = {"caution": caution} if form == "cautious" else {}
    return Combination.of(rewards, GroupMean(combine=form, **options))


def test_the_worst_is_the_smallest_that_is_known():
    assert worst(ROWS).tolist() == pytest.approx([1, -4, 5, NAN], nan_ok=True)


def test_a_cautious_mean_loses_by_the_variance_over_n():
    """Of 1, 2, 6 the mean is 3 and the variance (4 + 1 + 9) / 3; of -4 and 2 they are -1 and 9; one alone has none."""
    assert cautious(ROWS, 0.5).tolist() == pytest.approx([3 - 0.5 * 14 / 3, -1 - 4.5, 5, NAN], nan_ok=True)
    assert cautious(ROWS, 0.0).tolist() == pytest.approx([3, -1, 5, NAN], nan_ok=True)


@pytest.mark.parametrize("rule", [worst, lambda members: cautious(members, 0.7)])
def test_one_member_and_equal_members_are_what_they_were(rule):
    values = torch.tensor([1.5, -2.0, 0.25], dtype=torch.float64)
    torch.testing.assert_close(rule(values[:, None]), values)
    torch.testing.assert_close(rule(values[:, None].expand(-1, 4)), values)


def test_the_worst_rises_with_each_member_and_a_cautious_mean_need_not():
    torch.manual_seed(0)
    members = torch.randn(50, 3, dtype=torch.float64)
    for k in range(3):
        raised = members.clone()
        raised[:, k] += 0.5
        assert (worst(raised) >= worst(members)).all()
        assert (worst(raised) > worst(members)).any()
    high = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, 4.0]], dtype=torch.float64)
    low, raised = cautious(high, 1.0).tolist()
    assert (low, raised) == pytest.approx((1 - 2, 4 / 3 - 32 / 9))
    assert raised < low


def test_members_have_weights_as_scales_and_offsets_as_zeros():
    rewards = torch.tensor([[20.0, 0.5], [22.0, 0.25]], dtype=torch.float64)
    scaled = {"weights": (0.5, 2.0), "offsets": (20.0, 0.25)}  # (0, 0.5) and (1, 0)
    assert of("worst", **scaled).total(rewards).tolist() == [0, 0]
    found = of("cautious", **scaled, caution=2.0).total(rewards)
    assert found.tolist() == pytest.approx([0.25 - 2 / 16, 0.5 - 2 * 0.25])
    assert of("sum", **scaled).total(rewards).tolist() == [0.5, 1]
    assert of("worst", (1.0, -1.0), (0.0, 0.0)).total(rewards).tolist() == [-0.5, -0.25]  # a penalty is a member


@pytest.mark.parametrize("form", ["sum", "per_reward", "decoupled"])
def test_what_the_baseline_adds_stays_by_itself(form):
    found = of(form, (1.0, 2.0, 3.0), (0.0, 1.0, 0.0))
    expected = torch.tensor([[1.0, 1.0, 6.0], [-4.0, NAN, 2.0], [NAN, 4.0, NAN], [NAN] * 3], dtype=torch.float64)
    torch.testing.assert_close(found.columns(ROWS), expected, equal_nan=True)
    assert found.weights.tolist() == [1, 2, 3]
    assert found.total(ROWS).tolist() == pytest.approx([21, 2, 8, NAN], nan_ok=True)


@pytest.mark.parametrize("form", ["worst", "cautious"])
def test_what_is_made_at_once_is_one_column_that_counts_once(form):
    """Weights are in it, so that a baseline does not multiply by them again."""
    found = of(form, (1.0, 2.0, 3.0))
    columns = found.columns(ROWS)
    assert columns.shape == (4, 1)
    torch.testing.assert_close(columns[:, 0], found.total(ROWS), equal_nan=True)
    groups = torch.zeros(4, 1, dtype=torch.long)
    advantages = LeaveOneOut(combine=form).advantages(columns, found.weights, groups)
    values = columns[:3, 0].tolist()
    expected = [v - (sum(values) - v) / 2 for v in values]
    assert advantages.tolist() == pytest.approx([max(-5, min(5, a)) for a in expected] + [0])
