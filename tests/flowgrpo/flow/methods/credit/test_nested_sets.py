"""Credit of a tree whose edges are compared in nested families: hand-computed trees, corners, invariances, refusals."""

import math

import pytest
import torch
from credited import SDE, SIGMAS, by_path, column, drawn, tree

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit.nested_sets import Nested
from flowgrpo.flow.methods.credit.rules import Depthwise, Siblings, paths_of
from flowgrpo.training.advantages.baseline import LeaveOneOut
from flowgrpo.training.advantages.comparison_sets import nested_leave_one_out
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.tree_credit import subtree_means
from samplers.growth import grow
from samplers.plans import branch, brush, chain
from samplers.trees import Move, Root

NAN = math.nan
ONE = torch.ones(1, dtype=torch.float64)
GROUP, BETWEEN, SIBLINGS = (
    {"group": 0.0, "between": 0.0, "siblings": 0.0} | {name: 1.0} for name in ("group", "between", "siblings")
)


def split_twice(strength=None, splits=(0, 1)):
    """Two children at each split, then ODE: leaves (0, 0), (0, 1), (1, 0), (1, 1)."""
    return branch([SDE] * 3, splits, 2, stochastic=(0, 1), trained=(0, 1), sibling_strength=strength, noise_scale=1.0)


def worth(units, **options):
    """The advantages of units."""
    return LeaveOneOut(clip=1e9, **options).advantages(
        units.values, torch.ones(1, dtype=torch.float64), units.comparison, nested=units.nested
    )


def of_edges(grown, rewards, **weights):
    units = Nested(**weights).units(grown, column(rewards), ONE)
    return by_path(grown, units, worth(units).tolist())


REWARDS = [1.0, 3.0, 4.0, 10.0]  # of one tree: the nodes of depth 1 are worth 2 and 7
TREE = tree(split_twice(), 1, 1)


def test_a_depth_is_compared_with_its_other_nodes():
    """At depth 2: 1 against the mean of 3, 4 and 10, and so on; the ODE steps at the end have no credit."""
    assert of_edges(TREE, REWARDS, **GROUP) == pytest.approx(
        {
            ((0,), 1): 2 - 7,
            ((1,), 1): 7 - 2,
            ((0, 0), 2): 1 - 17 / 3,
            ((0, 1), 2): 3 - 15 / 3,
            ((1, 0), 2): 4 - 14 / 3,
            ((1, 1), 2): 10 - 8 / 3,
        }
    )


def test_siblings_are_compared_with_each_other():
    assert of_edges(TREE, REWARDS, **SIBLINGS) == pytest.approx(
        {((0,), 1): -5, ((1,), 1): 5, ((0, 0), 2): -2, ((0, 1), 2): 2, ((1, 0), 2): -6, ((1, 1), 2): 6}
    )


def test_weights_are_of_the_levels_that_have_another_node():
    """Three quarters and a quarter at a split; where a state has one child, the whole weight is the group's."""
    grown = tree(split_twice(splits=(0,)), 1, 1)
    found = of_edges(grown, [1.0, 5.0], group=0.75, between=0.0, siblings=0.25)
    assert found == pytest.approx({((0,), 1): -4, ((1,), 1): 4, ((0,), 2): -4, ((1,), 2): 4})
    assert of_edges(grown, [1.0, 5.0], **SIBLINGS) == pytest.approx(
        {((0,), 1): -4, ((1,), 1): 4, ((0,), 2): 0, ((1,), 2): 0}
    )
    mixed = of_edges(TREE, REWARDS, group=3.0, between=0.0, siblings=1.0)
    assert mixed[(0, 0), 2] == pytest.approx(0.75 * (1 - 17 / 3) + 0.25 * (1 - 3))


def test_with_starts_trees_are_siblings_of_each_other_unless_the_start_splits():
    """Two trees of a group: worth 2 and 14 above a split at step 1; split at step 0 they compare children alone."""
    rewards = [1.0, 3.0, 10.0, 18.0]
    for split, expected in ((1, [-12, -8, -2, 2, 8, 12]), (0, [-8, -2, 2, 8])):
        units = Nested(starts=True, **SIBLINGS).units(tree(split_twice(splits=(split,)), 1, 2), column(rewards), ONE)
        assert sorted(worth(units).tolist()) == pytest.approx(expected)


def test_between_are_the_start_and_the_children_of_earlier_splits():
    """Two trees of one group: an edge of depth 2 that leaves (0,) has its own tree between the group and its sibling."""
    grown = tree(split_twice(), 1, 2)
    rewards = [*REWARDS, 100.0, 100.0, 100.0, 200.0]
    units = Nested(**BETWEEN).units(grown, column(rewards), ONE)
    found = dict(zip(((n.root.index, n.path[1:], n.step) for n in grown.nodes), units.of_edge.tolist(), strict=True))
    advantages = worth(units)[[found[place] for place in ((0, (0,), 1), (0, (0, 0), 2), (1, (1, 1), 2))]]
    # The first leaves the start itself: its siblings are all there is of its tree.
    assert advantages.tolist() == pytest.approx([0, 1 - 17 / 3, 200 - 100])


def test_a_family_lies_below_each_child_of_an_earlier_split():
    """Three splits: behind the second the family of a child of the first has four leaves, of which two are others' own."""
    sigmas = (1.0, 0.8, 0.6, 0.4, 0.0)
    steps = range(3)
    plan = branch([SDE] * 4, steps, 2, stochastic=steps, trained=steps, sibling_strength=None, noise_scale=1.0)
    grown = grow(plan, sigmas, [Root(0, 0, None)], (torch.zeros(1, 2),), lambda x, sigma, rows: x, drawn, 4)
    rewards = [0.0, 2.0, 5.0, 9.0, 20.0, 20.0, 20.0, 20.0]
    found = of_edges(grown, rewards, **BETWEEN)
    whole = 0 - (2 + 5 + 9 + 80) / 7  # below the start
    family = 0 - (2 + 5 + 9) / 3  # below (0,)
    assert found[(0, 0, 0), 3] == pytest.approx((whole + family) / 2)
    assert found[(0, 0), 2] == pytest.approx(1 - (7 + 20 + 20) / 3)  # the state (0,) that it leaves is no family


def test_a_group_mean_hides_the_weight_that_is_not_here():
    """Of 4 leaves a group mean leaves 1/2 of the first split and 3/4 of the second."""
    found = of_edges(TREE, REWARDS, **GROUP)
    units = Depthwise().units(TREE, column(REWARDS), ONE)
    below = by_path(TREE, units, (units.values[:, 0] - 4.5).tolist())
    assert all(
        below[place] == pytest.approx(value * (1 / 2 if place[1] == 1 else 3 / 4)) for place, value in found.items()
    )


@pytest.mark.parametrize(
    ("plan", "weights", "credit", "count", "unnested"),
    [
        (split_twice(), GROUP, Depthwise(), 6, 4),  # which has a credit of the last step, too, by ODE
        (brush([SDE] * 3, [3, 2, 0], None), SIBLINGS, Siblings(), 5, 0),
    ],
    ids=["group", "siblings on a brush"],
)
def test_one_level_alone_is_a_plain_credit_with_leave_one_out(plan, weights, credit, count, unnested):
    grown = tree(plan, 2, 2)
    rewards = column([float(i * i % 13) for i in range(len(grown.leaves))])
    expected, found = (
        {i: worth(units)[unit].item() for i, unit in enumerate(units.of_edge.tolist()) if unit >= 0}
        for units in (credit.units(grown, rewards, ONE), Nested(**weights).units(grown, rewards, ONE))
    )
    assert (len(found), len(expected)) == (4 * count, 4 * (count + unnested))
    assert found == pytest.approx({i: expected[i] for i in found})


def test_on_chains_every_edge_is_compared_with_the_other_chains():
    grown = tree(chain([SDE] * 3, range(2), range(2)), 1, 3)
    units = Nested(group=0.75, between=0.0, siblings=0.25).units(grown, column([1.0, 4.0, 7.0]), ONE)
    assert sorted(worth(units).tolist()) == pytest.approx([-4.5] * 2 + [0] * 2 + [4.5] * 2)


def test_a_lost_leaf_is_in_no_mean_and_a_lost_node_is_nobodys_other():
    assert of_edges(TREE, [NAN, 3.0, 4.0, 10.0], **GROUP) == pytest.approx(
        {((0,), 1): 3 - 7, ((1,), 1): 4, ((0, 0), 2): 0, ((0, 1), 2): -4, ((1, 0), 2): -2.5, ((1, 1), 2): 6.5}
    )
    found = of_edges(TREE, [NAN, NAN, 4.0, 10.0], group=0.75, between=0.0, siblings=0.25)
    assert found[(1,), 1] == found[(0,), 1] == 0  # nobody is left to be compared with
    assert found[(1, 1), 2] == pytest.approx(6)
    means = subtree_means(paths_of(TREE), column([NAN, 3.0, 4.0, 10.0]))[:3, 0]
    assert means.tolist() == pytest.approx([NAN, 3, 7], nan_ok=True)


@pytest.mark.parametrize("weights", [GROUP, BETWEEN, SIBLINGS, {"group": 1.0, "between": 2.0, "siblings": 3.0}])
def test_a_shift_of_all_rewards_changes_nothing_and_a_factor_multiplies(weights):
    grown = tree(split_twice(), 1, 2)
    rewards = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    plain = of_edges(grown, rewards, **weights)
    moved = of_edges(grown, [2 * r + 7 for r in rewards], **weights)
    assert moved == pytest.approx({place: 2 * value for place, value in plain.items()})
    units = Nested(**weights).units(grown, column(rewards), ONE)
    assert worth(units).sum().item() == pytest.approx(0)  # of whole sets


def test_exchanged_subtrees_exchange_their_credit():
    weights = {"group": 0.5, "between": 0.2, "siblings": 0.3}
    one = of_edges(TREE, [1.0, 3.0, 4.0, 10.0], **weights)
    other = of_edges(TREE, [10.0, 4.0, 1.0, 3.0], **weights)
    for path, step in one:
        swapped = (1 - path[0], *(1 - p if path[0] == 1 else p for p in path[1:]))
        assert other[swapped, step] == pytest.approx(one[path, step])


def test_groups_are_not_compared_with_each_other():
    grown = tree(split_twice(), 2, 1)
    units = Nested(group=1.0, between=1.0, siblings=1.0).units(
        grown, column([*REWARDS, *(1000 + r for r in REWARDS)]), ONE
    )
    first, second = (worth(units)[units.comparison[:, 0] == group] for group in (10, 11))
    torch.testing.assert_close(first, second)
    assert first.abs().max() < 10


@pytest.mark.parametrize("strength", [1.0, 4.0])
def test_what_siblings_noises_share_is_divided_out(strength):
    """Of two siblings of covariance c, the other takes the fraction c of the signal along; of three others one does."""
    alike = 1 / (1 + strength**2)
    grown = tree(split_twice(strength), 1, 1)
    found, own = of_edges(grown, REWARDS, **SIBLINGS), of_edges(TREE, REWARDS, **SIBLINGS)
    assert found == pytest.approx({place: value / (1 - alike) for place, value in own.items()})
    found, own = of_edges(grown, REWARDS, **GROUP), of_edges(TREE, REWARDS, **GROUP)
    assert found[(0,), 1] == pytest.approx(own[(0,), 1] / (1 - alike))
    assert found[(0, 0), 2] == pytest.approx(own[(0, 0), 2] / (1 - alike / 3))


def test_kin_are_the_children_of_one_move():
    """Beside two children of one move a state has one of another, whose noise is its own."""

    def moves(role, step):
        if step:
            return (Move(),)
        return (Move(SDE, role="two", count=2, sibling_strength=1.0), Move(SDE, role="one"))

    grown = tree(moves, 1, 1)
    found = of_edges(grown, [0.0, 3.0, 12.0], **SIBLINGS)
    assert found == pytest.approx({((0,), 1): -7.5 / 0.75, ((1,), 1): -3 / 0.75, ((2,), 1): 10.5})


def test_a_std_is_one_for_all_depths_of_a_group():
    grown = tree(split_twice(), 2, 1)
    units = Nested(**GROUP).units(grown, column([*REWARDS, *(5 * r for r in REWARDS)]), ONE)
    plain, scaled = worth(units), worth(units, std="group", eps=0.0)
    for group in (10, 11):
        own = units.comparison[:, 0] == group
        torch.testing.assert_close(scaled[own], plain[own] / units.values[own, 0].std(correction=0))
    torch.testing.assert_close(worth(units, std="global", eps=0.0), plain / units.values[:, 0].std(correction=0))


def test_joined_units_of_two_processes_give_the_numbers_of_one():
    """Trees of one group on two processes, whose nodes have the same numbers there."""
    rewards, plan, start = [REWARDS, [2.0, 8.0, 5.0, 7.0]], split_twice(4.0), (torch.zeros(1, 2),)
    credit = Nested(group=0.5, between=0.3, siblings=0.2)
    alone = [grow(plan, SIGMAS, [Root(10, i, None)], start, lambda x, sigma, rows: x, drawn, 4) for i in (0, 1)]
    parts = [credit.units(grown, column(own), ONE) for grown, own in zip(alone, rewards, strict=True)]
    together, places = CreditUnits.concatenate([parts[1], parts[0]])
    whole = credit.units(tree(plan, 1, 2), column([*rewards[0], *rewards[1]]), ONE)
    for i, own in ((1, places[0]), (0, places[1])):
        torch.testing.assert_close(worth(together)[own], worth(whole)[whole.root == i])


def test_every_reward_by_itself():
    """What adds the advantages of each reward compares each in the same sets."""
    rewards = torch.tensor([REWARDS, [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64).T
    units = Nested(**GROUP).units(TREE, rewards, ONE)
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = LeaveOneOut(combine="per_reward", clip=1e9).advantages(
        units.values, weights, units.comparison, nested=units.nested
    )
    each = [nested_leave_one_out(column, units.comparison, units.nested) for column in units.values.T]
    torch.testing.assert_close(found, each[0] + 2 * each[1])


def test_siblings_of_one_noise_are_refused():
    with pytest.raises(InputError, match="siblings of different noise"):
        Nested(**GROUP).units(tree(split_twice(0.0), 1, 1), column(REWARDS), ONE)


@pytest.mark.parametrize(("splits", "told"), [((0, 1, 2), [0, 1, 2]), ((0, 2), [0, 1, 2]), ((1,), [0, 1, 1])])
def test_a_family_lies_below_the_start_and_below_children_of_splits(splits, told):
    """Of the edges of each step, below the state that they leave none begins, and below a lone child none."""
    steps = (0, 1, 2)
    plan = branch([SDE] * 3, splits, 2, stochastic=steps, trained=steps, sibling_strength=None, noise_scale=1.0)
    grown = tree(plan, 1, 1)
    units = Nested(group=0.0, between=1.0, siblings=0.0).units(grown, column([1.0] * len(grown.leaves)), ONE)
    families = {node.step: set() for node in grown.nodes if node.parent is not None}
    for node, unit in zip(grown.nodes, units.of_edge.tolist(), strict=True):
        if unit >= 0:
            families[node.step].add(int((units.nested.weight[unit] > 0).sum()))
    assert families == {step: {count} for step, count in enumerate(told, start=1)}
