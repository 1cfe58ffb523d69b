import pytest
import torch

from flowgrpo.training.advantages.balanced_clip import Balance

START = (0.4, 0.2)
RATIO = torch.tensor([2.0, 0.9, 0.5, 1.4])
ADVANTAGE = torch.tensor([1.0, 0.5, -1.0, -0.5])


def alone(total):
    return total


def contributions(low, high, ratio=RATIO, advantage=ADVANTAGE):
    """Of good and of bad samples, as a plain loop."""
    good = sum(a * min(r, 1 + high) for r, a in zip(ratio.tolist(), advantage.tolist(), strict=True) if a > 0)
    bad = sum(-a * max(r, 1 - low) for r, a in zip(ratio.tolist(), advantage.tolist(), strict=True) if a < 0)
    return good, bad


def test_a_target_that_is_met_leaves_the_range():
    """1.65 of good samples, 0.6 + 0.7 of bad ones."""
    assert contributions(*START) == pytest.approx((1.65, 1.3))
    assert Balance(target=1.26).find(START, RATIO, ADVANTAGE, alone) == START


def test_the_range_moves_until_the_target_is_met():
    """1.65 is less than 1.28 x 1.3. Low at its end, bad samples contribute 0.9 + 0.7; good ones need 2.05: 1.6 and 0.45."""
    low, high = Balance(target=1.28).find(START, RATIO, ADVANTAGE, alone)
    assert (low, high) == (0.1, pytest.approx(0.6))
    good, bad = contributions(low, high)
    assert good >= 1.28 * bad > contributions(low, high - 0.05)[0]


def test_a_target_out_of_reach_ends_at_the_end():
    """Good samples contribute at most 2 + 0.45."""
    assert Balance(target=9.0).find(START, RATIO, ADVANTAGE, alone) == (0.1, 2.0)
    assert Balance(target=9.0, end=[0.2, 0.33], step=0.05).find(START, RATIO, ADVANTAGE, alone) == (0.2, 0.33)


def test_contributions_grow_with_both_bounds_of_the_ratio():
    """So the lower bound, which is moved first, goes all the way where the target is missed."""
    goods, bads = zip(*(contributions(0.4 - 0.05 * i, 0.2 + 0.1 * i) for i in range(7)), strict=True)
    assert list(goods) == sorted(goods)
    assert list(bads) == sorted(bads)


@pytest.mark.parametrize("target", [1.0, 2.0])
def test_where_nothing_has_moved_the_bounds_do_not_matter(target):
    """Centred advantages are in balance; of others no range changes the share."""
    advantage = torch.tensor([1.0, -0.5, -0.5])
    found = Balance(target=target).find(START, torch.ones(3), advantage, alone)
    assert found == (START if target == 1 else (0.1, 2.0))


@pytest.mark.parametrize("target", [1.0, 1.28, 1.35, 9.0])
def test_two_processes_find_the_range_of_one(target):
    balance, sums = Balance(target=target), []
    for part in (slice(0, 1), slice(1, 4)):
        balance.find(START, RATIO[part], ADVANTAGE[part], lambda own: sums.append(own) or own)
    whole = balance.find(START, RATIO, ADVANTAGE, alone)
    assert balance.find(START, RATIO[:1], ADVANTAGE[:1], lambda own: sums[0] + sums[1]) == whole


def test_a_process_without_samples_takes_part():
    none = torch.tensor([])
    assert Balance().find(START, none, none, alone) == START
