import json
import math
from pathlib import Path

import pytest
import torch

from flowgrpo.training.advantages.baseline import (
    Absolute,
    Best,
    GroupMean,
    Median,
    group_mean,
    leave_one_out,
    weighted_sum,
    zero_std_fraction,
)

CASES = json.loads((Path(__file__).parents[3] / "data" / "group_advantages.json").read_text())


def tensors(*columns):
    return [torch.tensor(c, dtype=torch.float64 if isinstance(c[0], float) else torch.int64) for c in columns]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{len(c['rewards'])}-global{c['global_std']}")
def test_group_mean_equals_the_reference_tracker(case):
    values, groups = tensors(case["rewards"], case["group"])
    std = "global" if case["global_std"] else "group"
    ours = group_mean(values, groups, std=std, eps=case["eps"], ddof=case["ddof"])
    torch.testing.assert_close(ours, torch.tensor(case["advantages"], dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_unbiased_std_with_a_small_eps_is_the_dance_grpo_form():
    values, groups = tensors([1.0, 3.0, 5.0, 2.0, 2.0, 8.0], [0, 0, 0, 4, 4, 4])
    expected = [(v - v_.mean()) / (v_.std() + 1e-8) for v_ in (values[:3], values[3:]) for v in v_]
    torch.testing.assert_close(group_mean(values, groups, std="group", eps=1e-8, ddof=1), torch.stack(expected))


def test_a_spread_below_the_least_one_teaches_nothing():
    values, sets = tensors([0.0, 1e-6, 3.0, 5.0], [0, 0, 1, 1])  # std by n - 1: 7e-7 and 1.41
    half = math.sqrt(0.5)
    for min_std, tiny in ((0.0, half), (1e-6, 0)):
        found = group_mean(values, sets, std="group", eps=0.0, ddof=1, min_std=min_std)
        assert found.tolist() == pytest.approx([-tiny, tiny, -half, half])


def test_leave_one_out_compares_with_the_others():
    values, groups = tensors([1.0, 4.0, 7.0, 5.0, 3.0], [0, 0, 0, 1, 1])
    expected = [1 - 5.5, 4 - 4.0, 7 - 2.5, 5 - 3.0, 3 - 5.0]
    assert leave_one_out(values, groups).tolist() == pytest.approx(expected)
    scaled = leave_one_out(values, groups, std="group", eps=0.0, ddof=0)
    assert scaled[4].item() == pytest.approx(-2.0 / 1.0)


def test_a_constant_group_has_no_advantage_even_with_rounding():
    values, groups = tensors([0.1, 0.1, 0.1, 0.3, 0.1, 0.2], [0, 0, 0, 1, 1, 1])
    for std in ("group", "global", "none"):
        assert group_mean(values, groups, std=std, eps=1e-8, ddof=1)[:3].tolist() == [0, 0, 0]
    assert zero_std_fraction(values, groups) == 0.5


@pytest.mark.parametrize("baseline", [group_mean, leave_one_out])
@pytest.mark.parametrize("std", ["group", "global", "none"])
def test_a_lost_value_changes_nothing_for_the_others(baseline, std):
    values, groups = tensors([1.0, 4.0, math.nan, 2.0, 7.0], [0, 0, 0, 1, 1])
    kept = torch.tensor([0, 1, 3, 4])
    with_lost = baseline(values, groups, std=std)
    torch.testing.assert_close(with_lost[kept], baseline(values[kept], groups[kept], std=std))
    assert with_lost[2] == 0


@pytest.mark.parametrize("baseline", [group_mean, leave_one_out])
def test_a_group_that_is_lost_whole_or_has_one_member_teaches_nothing(baseline):
    values, groups = tensors([math.nan, math.nan, 3.0, 1.0, 2.0], [0, 0, 1, 2, 2])
    assert baseline(values, groups, std="none")[:3].tolist() == [0, 0, 0]


PAIRS = torch.tensor([[0, 1], [1, 0], [0, 2], [0, 1], [1, 0], [0, 2], [0, 0]])  # rows, not their sums or columns


def test_units_are_compared_where_all_columns_agree():
    values = torch.tensor([1.0, 10.0, 100.0, 3.0, 30.0, 500.0, 7.0], dtype=torch.float64)
    assert group_mean(values, PAIRS, std="none").tolist() == [-1, -10, -200, 1, 10, 200, 0]
    assert leave_one_out(values, PAIRS).tolist() == [-2, -20, -400, 2, 20, 400, 0]
    assert group_mean(values, PAIRS, std="group", eps=0.0, ddof=0)[:6].tolist() == pytest.approx([-1, -1, -1, 1, 1, 1])
    spread = math.sqrt(((values - values.mean()) ** 2).mean())
    expected = [d / spread for d in (-1, -10, -200, 1, 10, 200, 0)]
    assert group_mean(values, PAIRS, std="global", eps=0.0, ddof=0).tolist() == pytest.approx(expected)


def test_several_columns_lose_and_agree_as_one_does():
    values = torch.tensor([1.0, 10.0, math.nan, 3.0, 10.0, 500.0, 7.0], dtype=torch.float64)
    assert group_mean(values, PAIRS, std="none").tolist() == [-1, 0, 0, 1, 0, 0, 0]
    assert zero_std_fraction(values, PAIRS) == pytest.approx(2 / 3)  # of three sets with two members one varies
    assert zero_std_fraction(values[:2], PAIRS[:2]) == 1  # nothing to compare with


def test_rewards_that_do_not_apply_leave_the_sum():
    values = torch.tensor([[1.0, 2.0], [math.nan, 2.0], [math.nan, math.nan]], dtype=torch.float64)
    total = weighted_sum(values, torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert total[:2].tolist() == [2.0, 1.0]
    assert total[2].isnan()


def test_one_outlier_does_not_move_the_median():
    values, groups = tensors([1.0, 2.0, 3.0, 4.0, 90.0, 5.0, 7.0], [0, 0, 0, 0, 0, 1, 1])
    # The mean, 20, is above four of five; of two the lower is the median.
    assert Median(std="none").relative(values, groups, None).tolist() == [-2, -1, 0, 1, 87, 0, 2]
    scaled = Median(std="mad", eps=0.5).relative(values, groups, None)
    assert scaled.tolist() == [-2 / 1.5, -1 / 1.5, 0, 1 / 1.5, 58, 0, 4]  # median of |2, 1, 0, 1, 87| is 1, of |0, 2| 0
    spread = values[:5].std(correction=0)
    torch.testing.assert_close(Median(std="group", eps=0.0).relative(values, groups, None)[4], 87 / spread)


@pytest.mark.parametrize("std", ["none", "mad", "group", "global"])
def test_a_lost_value_is_no_part_of_the_median(std):
    values, groups = tensors([1.0, math.nan, 3.0, 9.0, math.nan], [0, 0, 0, 0, 1])
    found = Median(std=std).relative(values, groups, None)
    assert found[[1, 2, 4]].tolist() == [0, 0, 0]
    assert found[0] < 0 < found[3]


WEIGHTS = torch.tensor([1.0, 1.0], dtype=torch.float64)
LOUD_AND_QUIET = torch.tensor([[0.0, 0.03], [10.0, 0.02], [20.0, 0.01], [30.0, 0.0]], dtype=torch.float64)
GROUP = torch.zeros(4, 1, dtype=torch.long)
TWO_PAIRS = torch.tensor([[0], [0], [1], [1]])


def advantages_of(baseline, values, sets, **options):
    """Advantages by one reward."""
    return baseline.advantages(torch.tensor(values).double()[:, None], WEIGHTS[:1], sets, **options).tolist()


def test_a_sum_starves_the_quiet_reward_and_others_do_not():
    by_sum = GroupMean(eps=0.0).advantages(LOUD_AND_QUIET, WEIGHTS, GROUP)
    loud = group_mean(LOUD_AND_QUIET[:, 0], GROUP, eps=0.0)
    torch.testing.assert_close(by_sum, loud, rtol=1e-2, atol=0)
    for combine in ("per_reward", "decoupled"):  # two opposite rewards of equal weight leave nothing
        assert GroupMean(eps=0.0, combine=combine).advantages(LOUD_AND_QUIET, WEIGHTS, GROUP).tolist() == [0] * 4
    louder = torch.tensor([2.0, 1.0], dtype=torch.float64)
    weighed = GroupMean(eps=0.0, combine="per_reward").advantages(LOUD_AND_QUIET, louder, GROUP)
    torch.testing.assert_close(weighed, loud)  # 2 z - z
    torch.testing.assert_close(GroupMean(eps=0.0, combine="decoupled").advantages(LOUD_AND_QUIET, louder, GROUP), loud)


def test_decoupled_advantages_have_mean_zero_and_spread_one_over_the_batch():
    torch.manual_seed(0)
    values, sets = torch.randn(24, 3, dtype=torch.float64), torch.arange(24)[:, None] // 6
    found = GroupMean(combine="decoupled", eps=0.0).advantages(values, torch.tensor([1.0, 0.3, 2.0]).double(), sets)
    assert found.mean().abs() < 1e-12
    assert found.std(correction=0) == pytest.approx(1)


def test_decoupled_advantages_are_divided_by_the_chosen_spread_of_the_batch_as_well():
    """Each column is -1 and 1 about the mean of its group, and their sums are -2, 2, -2, 2: of std 2, or sqrt(16 / 3)."""
    values = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    for ddof, std in ((0, 2.0), (1, math.sqrt(16 / 3))):
        found = GroupMean(combine="decoupled", std="none", eps=0.0, ddof=ddof).advantages(values, WEIGHTS, TWO_PAIRS)
        assert found.tolist() == pytest.approx([-2 / std, 2 / std, -2 / std, 2 / std])


def test_a_reward_that_does_not_apply_leaves_the_others():
    values = torch.tensor([[1.0, math.nan], [3.0, math.nan], [2.0, 5.0], [4.0, 7.0]], dtype=torch.float64)
    found = GroupMean(combine="per_reward", eps=0.0).advantages(values, WEIGHTS, TWO_PAIRS)
    assert found.tolist() == [-1, 1, -2, 2]


def test_an_absolute_baseline_needs_nobody_else():
    found = advantages_of(Absolute(value=0.5), [0.2, 0.9, math.nan], torch.arange(3)[:, None])
    assert found == pytest.approx([-0.3, 0.4, 0])


@pytest.mark.parametrize(("ddof", "std"), [(0, 2.0), (1, math.sqrt(8))])
@pytest.mark.parametrize("eps", [0.0, 1.0])
def test_an_absolute_baseline_is_divided_by_the_chosen_spread_of_what_is_known(ddof, std, eps):
    baseline = Absolute(value=2.0, std="global", eps=eps, ddof=ddof)
    found = advantages_of(baseline, [1.0, 5.0, math.nan], torch.arange(3)[:, None])
    assert found == pytest.approx([-1 / (std + eps), 3 / (std + eps), 0])


@pytest.mark.parametrize(("scale", "told"), [(10.0, [-50, -5, 20, 50]), (0.2, [-1, -0.1, 0.4, 1])])
def test_advantages_are_cut_before_they_are_multiplied(scale, told):
    baseline = Absolute(value=0.0, scale=scale, clip=5.0)
    assert advantages_of(baseline, [-7.0, -0.5, 2.0, 90.0], torch.arange(4)[:, None]) == pytest.approx(told)


def test_an_anchor_adds_multiples_of_the_value():
    anchor = torch.tensor([0.5, 0.1, 0.5], dtype=torch.float64)
    found = advantages_of(GroupMean(std="none"), [1.0, 3.0, math.nan], torch.zeros(3, 1), anchor=anchor)
    assert found == pytest.approx([-1 + 0.5, 1 + 0.3, 0])


def test_the_best_of_a_set_is_learned_from_and_none_of_equals():
    values, sets = [1.0, 4.0, 4.0, 7.0, 7.0, math.nan, 2.0], torch.tensor([[0], [0], [0], [1], [1], [1], [2]])
    assert advantages_of(Best(), values, sets) == [0, 1, 1, 0, 0, 0, 0]


def test_rewards_that_nearly_cancel_leave_what_is_left():
    values = torch.tensor([[0.0, 2.0], [2.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.99], dtype=torch.float64)
    found = GroupMean(combine="per_reward", std="none").advantages(values, weights, GROUP[:2])
    assert found.tolist() == pytest.approx([-0.01, 0.01])


def test_a_set_of_the_least_spread_itself_teaches():
    values, sets = tensors([0.0, 2.0], [0, 0])
    assert group_mean(values, sets, eps=0.0, min_std=1.0).tolist() == [-1, 1]
