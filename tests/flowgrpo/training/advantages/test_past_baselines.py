"""Baselines that compare with the rewards of earlier iterations."""

import itertools
import math

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.schema.schedule import HalfLife
from flowgrpo.training.advantages.baseline import GroupMean, leave_one_out
from flowgrpo.training.advantages.past_baselines import Cumulative, Quantile, Tracker, mixed_utility, move_quantiles
from flowgrpo.training.advantages.past_rewards import PastRewards
from flowgrpo.training.prompts.prompt_statistics import PromptStats

TWO_PAIRS = torch.tensor([[0], [0], [1], [1]])
FOREVER = 1e300  # a half-life


def relative(baseline, values, sets, past):
    return baseline.relative(torch.tensor(values, dtype=torch.float64), sets, past).tolist()


def past_of(mean):
    """One earlier reward of each prompt, or none where the mean is NaN."""
    return PastRewards(mean.isfinite().double(), mean, torch.zeros_like(mean))


def test_a_tracker_compares_with_what_the_prompt_gave_before():
    values, expected = [1.0, 1.0, 3.0, 5.0], torch.tensor([0.25, 0.25, math.nan, math.nan], dtype=torch.float64)
    found = relative(Tracker(std="none"), values, TWO_PAIRS, past_of(expected))
    assert found == [0.75, 0.75, -2, 2]  # a group of equal values teaches; one that is new has its others


@pytest.mark.parametrize("baseline", [Tracker, Cumulative, Quantile])
def test_units_smaller_than_a_trajectory_are_refused(baseline):
    said = f"{baseline().name} remembers what whole trajectories gave, take credit=terminal"
    with pytest.raises(InputError, match=said):
        relative(baseline(), [1.0, 1.0, 3.0, 5.0], TWO_PAIRS.repeat(1, 2), None)


@pytest.mark.parametrize(("ddof", "std"), [(0, 1.0), (1, math.sqrt(2))])
def test_what_was_expected_is_divided_by_the_chosen_spread(ddof, std):
    values, expected = [1.0, 5.0], torch.tensor([0.0, 2.0], dtype=torch.float64)  # 1 and 3: their mean is taken off
    found = relative(Tracker(eps=0.0, ddof=ddof), values, TWO_PAIRS[:2], past_of(expected))
    assert found == pytest.approx([-1 / std, 1 / std])


def visits(*groups, half_life=FOREVER, baseline=None):
    """The advantages of the last of some visits to a prompt, one in each iteration."""
    stats = PromptStats(HalfLife(after=half_life))
    for iteration, rewards in enumerate(groups[:-1]):
        stats.add([0] * len(rewards), torch.tensor(rewards, dtype=torch.float64), iteration)
    size = len(groups[-1])
    past = stats.past([0] * size, len(groups) - 1)
    return relative(baseline or Cumulative(eps=0.0), groups[-1], torch.zeros(size, 1), past)


def standardized(rewards, among, ddof=0):
    among = torch.tensor(among, dtype=torch.float64)
    return ((torch.tensor(rewards, dtype=torch.float64) - among.mean()) / among.std(correction=ddof)).tolist()


FIRST, SECOND, THIRD = [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0], [0.2, 0.9, 0.8, 0.5]


def test_the_first_visit_is_compared_within_the_group():
    for past in (None, PromptStats(HalfLife()).past([0] * 4, 0)):
        found = relative(Cumulative(), THIRD, torch.zeros(4, 1), past)
        assert found == relative(GroupMean(), THIRD, torch.zeros(4, 1), None)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("groups", [(FIRST, SECOND), (FIRST, SECOND, THIRD), (FIRST, SECOND, THIRD, FIRST)])
def test_later_visits_take_the_smaller_of_both_averages(groups, ddof):
    """DCPO's rule, from all rewards at once."""
    i, fresh = len(groups), standardized(groups[-1], groups[-1], ddof)
    every = standardized(groups[-1], [*itertools.chain(*groups)], ddof)
    averages = [(((i - 1) * a + b) / i, (a + (i - 1) * b) / i) for a, b in zip(fresh, every, strict=True)]
    assert visits(*groups, baseline=Cumulative(eps=0.0, ddof=ddof)) == pytest.approx(
        [min(x, key=abs) for x in averages]
    )


def test_a_group_of_equal_rewards_takes_a_part_of_what_all_rewards_say():
    every = standardized([1.0], [*FIRST, *SECOND, *[1.0] * 4])[0]
    assert visits(FIRST, SECOND, [1.0] * 4) == pytest.approx([every / 3] * 4)
    assert visits([0.1] * 4, [0.1] * 4) == [0] * 4  # though the mean of equal numbers is rounded
    assert visits([1.0] * 4) == [0] * 4


def test_earlier_rewards_are_forgotten_by_half_lives():
    """After one half-life each counts half: 4 rewards of 6 are of this visit."""
    weight, rewards = torch.tensor([0.5] * 4 + [1.0] * 4, dtype=torch.float64), torch.tensor(FIRST + SECOND).double()
    mean = (weight * rewards).sum() / 6
    std = ((weight * (rewards - mean) ** 2).sum() / 6).sqrt()
    every, fresh = ((rewards[4:] - mean) / std).tolist(), standardized(SECOND, SECOND)
    pairs = [(a / 3 + 2 * b / 3, 2 * a / 3 + b / 3) for a, b in zip(fresh, every, strict=True)]
    assert visits(FIRST, SECOND, half_life=1.0) == pytest.approx([min(x, key=abs) for x in pairs])


def test_prompts_and_lost_rewards_are_kept_apart():
    stats = PromptStats(HalfLife(after=FOREVER))
    stats.add([7, 7, 8], torch.tensor([1.0, 3.0, 5.0]), 0)
    past = stats.past([7, 7, 7, 9, 9], 1)
    assert (past.count.tolist(), past.square.tolist()) == ([2, 2, 2, 0, 0], [2, 2, 2, 0, 0])
    found = relative(Cumulative(eps=0.0), [4.0, math.nan, 0.0, 1.0, 2.0], torch.tensor([[0]] * 3 + [[1]] * 2), past)
    assert found[1] == 0
    assert found[3:] == [-1, 1]
    assert found[0] == -found[2] == pytest.approx((1 + 2 / math.sqrt(2.5)) / 2)  # 2 of 4 rewards are new


def test_the_utility_has_the_slopes_of_riskpo():
    values = torch.tensor([-3.0, -2.0, 0.5, 0.75, 4.0, 9.0], dtype=torch.float64)
    found = mixed_utility(values, -1.0, 2.0, levels=[0.2, 0.8], weight=1.5).tolist()
    slopes = [(found[i + 1] - found[i]) / float(values[i + 1] - values[i]) for i in (0, 2, 4)]
    assert slopes == pytest.approx([1.5 / (0.2 * 2.5), 1 / (0.6 * 2.5), 0])


def test_the_mean_utility_moves_as_the_mixed_value_at_risk():
    """Of numbers even in [0, 1] it is (1.5 x 0.1 + 0.5) / 2.5: the means below the lower quantile and between the two.

    By a shift it moves alike, and by a factor in proportion.
    """
    uniform, small = (torch.arange(200_000).double() + 0.5) / 200_000, 1e-4
    levels = [0.2, 0.8]
    moved = [mixed_utility(x, *levels, levels=levels, weight=1.5).mean() for x in (uniform + small, uniform - small)]
    assert float(moved[0] - moved[1]) / (2 * small) == pytest.approx(1, rel=1e-3)
    scaled = [mixed_utility(uniform * x, *levels, levels=levels, weight=1.5).mean() for x in (1 + small, 1 - small)]
    assert float(scaled[0] - scaled[1]) / (2 * small) == pytest.approx((1.5 * 0.1 + 0.5) / 2.5, rel=1e-3)


def test_a_quantile_baseline_without_tails_is_leave_one_out():
    values, sets = torch.tensor([0.3, 0.9, -2.0, 4.0]).double(), TWO_PAIRS
    past = PastRewards(*torch.zeros(3, 4).double(), memory=[-2.0, 4.0])
    found = Quantile(levels=[1e-12, 1 - 1e-12], weight=0.0, std="none").relative(values, sets, past)
    torch.testing.assert_close(found, leave_one_out(values, sets))


def test_bad_samples_weigh_more_and_good_ones_are_alike():
    past = PastRewards(*torch.zeros(3, 4).double(), memory=[0.0, 1.0])
    found = relative(Quantile(std="none"), [-1.0, 0.0, 1.5, 9.0], TWO_PAIRS, past)
    assert found == pytest.approx([-1.5 / (0.2 * 2.5), 1.5 / (0.2 * 2.5), 0, 0])


def test_the_first_quantiles_are_those_of_the_rewards_themselves():
    values, sets = [0.0, 1.0, 2.0, 3.0, 4.0, math.nan], torch.zeros(6, 1)
    baseline = Quantile(levels=[0.25, 0.75])
    assert baseline.remember([], torch.tensor(values)) == [1, 3]
    past = PastRewards(*torch.zeros(3, 6).double(), memory=[1.0, 3.0])
    assert relative(baseline, values, sets, None) == relative(baseline, values, sets, past)
    lost = torch.full((2,), math.nan)
    assert (baseline.remember([], lost), baseline.remember([1.0, 3.0], lost)) == ([], [1, 3])
    assert baseline.relative(lost, sets[:2], None).tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_tracked_quantiles_come_to_those_of_a_known_law(scale):
    """Of the exponential law with mean 1 they are -ln(1 - level)."""
    torch.manual_seed(0)
    levels, quantiles, seen = [0.2, 0.8], [4 * scale, 4 * scale], []
    for _ in range(3000):
        values = scale * torch.empty(64, dtype=torch.float64).exponential_()
        quantiles = move_quantiles(quantiles, levels, values, 0.1)
        seen.append(quantiles)
    mean = torch.tensor(seen[1000:], dtype=torch.float64).mean(0) / scale
    assert mean.tolist() == pytest.approx([-math.log(0.8), -math.log(0.2)], rel=0.02)


def test_a_step_of_the_tracked_quantiles_by_hand():
    values = torch.tensor([0.0, 0.0, 4.0, 4.0], dtype=torch.float64)  # of std 2, and half of them below 1 and 3
    assert move_quantiles([1.0, 3.0], [0.2, 0.8], values, 0.1) == pytest.approx([1 - 0.2 * 0.3, 3 + 0.2 * 0.3])


def test_tracked_quantiles_do_not_cross():
    """Nine of ten values lie between the two, and one is far away: the std is 300, and the steps are 6 and -3."""
    values = torch.tensor([0.0] * 9 + [1000.0], dtype=torch.float64)
    assert move_quantiles([-0.1, 0.1], [0.2, 0.8], values, 0.1) == pytest.approx([5.9, 5.9])
