"""The mean of the others in sets within sets."""

import math
from dataclasses import replace

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.training.advantages.baseline import Median, leave_one_out
from flowgrpo.training.advantages.comparison_sets import NestedSets, nested_leave_one_out

VALUES = torch.tensor([1.0, 4.0, 10.0, 3.0], dtype=torch.float64)
ONE = torch.zeros(4, 1, dtype=torch.long)


def sets(weights, alike=0.0, pairs=(0, 0, 1, 1)):
    """All four units, and two pairs of them, who are kin."""
    members = torch.tensor([[[-1, -1], [0, pair]] for pair in pairs])
    weight = torch.tensor([weights] * 4, dtype=torch.float64)
    return NestedSets(members, weight, torch.tensor(pairs)[:, None], torch.full((4,), alike, dtype=torch.float64))


def test_levels_are_averaged_by_weight():
    whole = [1 - 17 / 3, 4 - 14 / 3, 10 - 8 / 3, 3 - 5]
    pairs = [-3, 3, 7, -7]
    for weights in ([1.0, 0.0], [0.0, 2.0], [3.0, 1.0]):
        expected = [(weights[0] * a + weights[1] * b) / sum(weights) for a, b in zip(whole, pairs, strict=True)]
        assert nested_leave_one_out(VALUES, ONE, sets(weights)).tolist() == pytest.approx(expected)


def test_one_set_is_leave_one_out():
    found = nested_leave_one_out(VALUES, ONE, sets([1.0, 0.0]), std="group")
    torch.testing.assert_close(found, leave_one_out(VALUES, ONE, std="group"))


def test_of_levels_with_one_set_the_last_counts_and_the_next_ones_grow():
    members = torch.tensor(
        [[[-1, -1], [0, 0], [0, 7], [1, pair], [2, pair], [3, i]] for i, pair in enumerate((0, 0, 1, 1))]
    )
    weight = torch.tensor([[1.0, 2.0, 0.0, 3.0, 4.0, 5.0]] * 4, dtype=torch.float64)
    made = NestedSets(members, weight, torch.zeros(4, 1, dtype=torch.long), torch.zeros(4).double(), growth=2.0)
    for growing, expected in ((made, [0, 2, 0, 0, 4 * 4, 5 * 9]), (replace(made, growth=0.0), [0, 2, 0, 0, 4, 5])):
        assert growing.weights(ONE).tolist() == [expected] * 4
    assert NestedSets.concatenate([made], torch.tensor([0, 1])).growth == 2


def test_where_nobody_else_is_known_the_other_levels_have_the_weight():
    values = VALUES.clone()
    values[1] = math.nan
    found = nested_leave_one_out(values, ONE, sets([1.0, 1.0]))
    assert found.tolist() == pytest.approx([1 - 6.5, 0, (10 - 2 + 7) / 2, (3 - 5.5 - 7) / 2])
    assert nested_leave_one_out(values, ONE, sets([0.0, 1.0]))[0] == 0


def test_known_kin_are_divided_out_by_their_share_of_the_others():
    plain, kin = (nested_leave_one_out(VALUES, ONE, sets([1.0, 0.0], alike)) for alike in (0.0, 0.3))
    torch.testing.assert_close(kin, plain / (1 - 0.3 / 3))
    values = VALUES.clone()
    values[1] = math.nan  # the first has no kin left that is known
    plain, kin = (nested_leave_one_out(values, ONE, sets([1.0, 0.0], alike)) for alike in (0.0, 0.3))
    assert kin[0] == plain[0]
    torch.testing.assert_close(kin[2:], plain[2:] / (1 - 0.3 / 2))


def test_the_expectation_is_the_whole_gradient_where_noises_are_alike():
    """Four normal draws, of which pairs share a part: E[A xi] of the reward x + x^2 / 2 at x = mean + xi is 1 + mean."""
    torch.manual_seed(0)
    draws, alike, mean = 40000, 0.4, 0.5
    own, shared = torch.randn(draws, 4, dtype=torch.float64), torch.randn(draws, 2, dtype=torch.float64)
    xi = math.sqrt(alike) * shared[:, [0, 0, 1, 1]] + math.sqrt(1 - alike) * own
    x = mean + xi
    comparison = torch.arange(draws).repeat_interleave(4)[:, None]
    for weights in ([1.0, 0.0], [0.0, 1.0], [3.0, 1.0]):
        each = sets(weights, alike)
        parts = (each.members, each.weight, each.kin, each.alike)
        whole = NestedSets(*(part.repeat(draws, *[1] * (part.dim() - 1)) for part in parts))
        advantages = nested_leave_one_out((x + x**2 / 2).flatten(), comparison, whole).reshape(draws, 4)
        signal = (advantages * xi).mean(1)
        assert abs(signal.mean() - (1 + mean)) < 4 * signal.std() / math.sqrt(draws)


def test_a_median_has_no_others():
    with pytest.raises(
        InputError, match="credit nested compares with means, take leave_one_out, or for texts group_mean"
    ):
        Median().advantages(VALUES[:, None], torch.ones(1).double(), ONE, nested=sets([1.0, 1.0]))
