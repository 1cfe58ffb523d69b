"""Credit of steps by the values of their states, and the noise that is calibrated by it."""

import math
from itertools import pairwise

import pytest
import torch
from credited import SDE, column, sets, tree, valued

from flowgrpo.flow.methods.credit.rules import (
    DiscountedValue,
    Siblings,
    StepGain,
    adjust_levels,
    state_values,
    step_signs,
)
from flowgrpo.training.advantages.baseline import GroupMean, group_mean
from samplers.plans import brush, twigs
from samplers.trees import TRUNK, TWIG, Move

NAN = math.nan
ONE = torch.ones(1, dtype=torch.float64)


def by_start(grown, units, of):
    """What is `of` the unit of each edge that has one, in the order of steps, for each start."""
    found = [[] for node in grown.nodes if node.parent is None]
    for node, unit in sorted(zip(grown.nodes, units.of_edge.tolist(), strict=True), key=lambda each: each[0].step):
        if unit >= 0:
            found[node.root.index].append(of[unit].item())
    return found


def near(rows, **options):
    return [pytest.approx(row, **options) for row in rows]


@pytest.mark.parametrize("stochastic", [(0, 1), (0, 1, 2)])
@pytest.mark.parametrize("length", [None, 1])
def test_gains_add_up_to_the_value_of_the_end_minus_that_of_the_start(stochastic, length):
    grown = tree(twigs([SDE] * 3, stochastic, length, True), groups=1, size=2)
    values = [[1.0, 5.0, 2.0, 7.0], [0.0, -1.0, 0.5, 7.0]]
    values = [line[: len(stochastic) + 1] for line in values]
    units = StepGain().units(grown, valued(grown, values), ONE)
    assert by_start(grown, units, units.values[:, 0]) == near([b - a for a, b in pairwise(line)] for line in values)
    twig_edges = [i for i, node in enumerate(grown.nodes) if node.role == TWIG]
    assert units.of_edge[twig_edges].tolist() == [-1] * len(twig_edges)


@pytest.mark.parametrize(
    ("compare", "told", "sizes"),
    [("step", [[10, 1], [10, 2], [11, 1], [11, 2]], [3] * 4), ("joint", [[10, 0], [11, 0]], [6] * 2)],
)
def test_gains_are_compared_at_their_step_or_jointly(compare, told, sizes):
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=2, size=3)
    units = StepGain(compare=compare).units(grown, torch.zeros(len(grown.leaves), 1, dtype=torch.float64), ONE)
    assert units.comparison.unique(dim=0).tolist() == told
    assert sets(units) == sizes


@pytest.mark.parametrize(("compare", "first", "second"), [("step", 1, 1), ("joint", 10 / 50.5**0.5, 1 / 50.5**0.5)])
def test_joint_comparison_leaves_the_larger_gains_larger(compare, first, second):
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=1, size=2)
    rewards = valued(grown, [[0, 10, 11], [0, -10, -11]])  # gains 10 and 1, -10 and -1
    units = StepGain(compare=compare).units(grown, rewards, ONE)
    found = group_mean(units.values[:, 0], units.comparison, std="group", eps=0.0, ddof=0)
    assert by_start(grown, units, found) == near([[first, second], [-first, -second]])


def judged(values, discount=0.5, anchor=0.1, anchored_steps=2, root=False):
    """Chains of three stochastic steps, whose states have values[start][1:]."""
    grown = tree(twigs([SDE] * 3, (0, 1, 2), 1, root), groups=1, size=len(values))
    credit = DiscountedValue(discount=discount, anchor=anchor, anchored_steps=anchored_steps)
    return grown, credit.units(grown, valued(grown, values), ONE)


@pytest.mark.parametrize("root", [False, True])
def test_the_value_to_come_is_discounted_and_edges_weigh_as_theirs_over_the_mean_of_the_trajectory(root):
    """The start has no say; 7, 6 and 8 have mean 7."""
    grown, units = judged([[99.0, 4.0, 2.0, 8.0], [99.0, 1.0, 1.0, 1.0]], root=root)
    quality = [[4 + 0.5 * 2 + 0.25 * 8, 2 + 0.5 * 8, 8.0], [1.75, 1.5, 1.0]]
    assert by_start(grown, units, units.values[:, 0]) == near(quality)
    assert units.comparison.unique(dim=0).tolist() == [[10, 1], [10, 2], [10, 3]]
    assert by_start(grown, units, units.weight) == near([[1, 6 / 7, 8 / 7], [q * 3 / 4.25 for q in quality[1]]])


def test_a_value_below_zero_weighs_nothing_unless_all_are():
    grown, units = judged([[0, -1.0, 2.0, 4.0], [0, -1.0, -2.0, -3.0]], discount=0.0)
    assert by_start(grown, units, units.weight) == [[0, 1, 2], [1, 1, 1]]


def test_the_weight_is_of_the_weighted_sum_of_the_rewards():
    grown = tree(twigs([SDE] * 3, (0, 1, 2), 1, False), groups=1, size=1)
    rewards = torch.cat([valued(grown, [[0, 1, 2, 3]]), valued(grown, [[0, 5, -3, 1]])], dim=1)
    units = DiscountedValue(discount=0.0).units(grown, rewards, torch.tensor([1.0, 2.0], dtype=torch.float64))
    # 1 + 2 * 5, 2 - 2 * 3, which weighs nothing, and 3 + 2 * 1 have mean 16 / 3.
    assert by_start(grown, units, units.weight) == near([[11 * 3 / 16, 0, 5 * 3 / 16]])


def test_a_lost_value_loses_what_is_summed_up_to_it():
    grown, units = judged([[0, 4.0, NAN, 8.0], [0, 1.0, 1.0, 1.0]])
    assert by_start(grown, units, units.values[:, 0]) == near([[NAN, NAN, 8], [1.75, 1.5, 1]], nan_ok=True)
    assert units.weight.isfinite().all()


def test_the_anchor_teaches_the_first_steps_where_a_group_agrees():
    grown, units = judged([[0, 4.0, 2.0, 8.0]] * 3, anchored_steps=2, anchor=0.25)
    plain, anchored = (
        GroupMean().advantages(units.values, ONE, units.comparison, anchor=anchor) for anchor in (None, units.anchor)
    )
    assert plain.tolist() == [0] * 9
    assert by_start(grown, units, anchored) == near([[0.25 * 7, 0.25 * 6, 0]] * 3)


@pytest.mark.parametrize("twig_first", [False, True])
def test_a_twig_measures_a_state_before_the_trunk_does(twig_first):
    """From step 1 on the trunk goes by ODE; only the state after step 1 has a twig beside it."""

    def plan(role, step):
        if step == 0:
            return (Move(SDE),)
        moves = (Move(), Move(role=TWIG, ode_stops=(3,))) if step == 1 else (Move(),)
        return moves[::-1] if twig_first else moves

    grown = tree(plan, 1, 1)
    rewards = {TWIG: 3.0, TRUNK: 5.0}
    values, known = state_values(grown, column([rewards[grown.nodes[leaf].role] for leaf in grown.leaves]))
    trunk = {node.step: i for i, node in enumerate(grown.nodes) if node.role == TRUNK}
    assert not known[trunk[0]]  # its only child is random
    assert [values[trunk[step]].item() for step in (1, 2, 3)] == [3, 5, 5]


def test_signs_are_counted_at_their_step():
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=1, size=4)
    rewards = valued(grown, [[0, 1, 5], [0, -1, -2], [0, 2, 2], [0, NAN, 5]])
    # Gains of the first step 1, -1, 2, and a lost one; of the second 4, -1, 0, and a lost one; the third is ODE.
    assert step_signs(grown, rewards[:, 0]).tolist() == [[2, 1, 0], [1, 1, 0]]


def test_noise_rises_where_signs_balance_and_falls_elsewhere():
    positive, negative = torch.tensor([[12.0, 13.0, 6.0, 14.0, 0.0], [12.0, 11.0, 18.0, 10.0, 0.0]])
    levels = adjust_levels([0.7, 0.7, 0.7, 0.015, 0.7], positive, negative, steps=[0.01] * 5, difference=3)
    # Differences of 0 and 2 are balanced, 12 and 4 are not; no level falls below the step; the last has no gains.
    assert levels == pytest.approx([0.71, 0.71, 0.69, 0.01, 0.7])


def test_noise_does_not_rise_above_the_kernel_s_highest_level():
    even, uneven = torch.tensor([5.0, 5.0, 5.0, 9.0]), torch.tensor([5.0, 5.0, 5.0, 1.0])
    levels = adjust_levels([0.7, 0.995, 1.0, 1.0], even, uneven, steps=[0.01] * 4, difference=2, highest=1.0)
    assert levels == [pytest.approx(0.71), 1.0, 1.0, pytest.approx(0.99)]


def test_a_difference_at_the_bound_is_no_balance():
    """3 and 1 differ by two: the level falls where fewer than two are asked for, and moves by a step of its own."""
    levels = [adjust_levels([0.7], *torch.tensor([[3.0], [1.0]]), steps=[0.01], difference=most) for most in (2, 3)]
    assert [level for (level,) in levels] == pytest.approx([0.69, 0.71])


def test_steps_of_more_children_weigh_as_much_as_others_where_steps_do():
    grown = tree(brush([SDE] * 3, [2, 4, 0]), groups=1, size=1)
    rewards = column([float(i) for i in range(len(grown.leaves))])
    for weights, told in (("edges", [1.0] * 6), ("steps", [1 / 2] * 2 + [1 / 4] * 4)):
        units = Siblings(weights=weights).units(grown, rewards, ONE)
        assert sorted(units.weight.tolist(), reverse=True) == told
