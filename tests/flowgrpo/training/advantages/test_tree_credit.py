"""Rules of credit on trees, by their identities."""

import pytest
import torch

from flowgrpo.training.advantages.baseline import GroupMean
from flowgrpo.training.advantages.comparison_sets import nested_leave_one_out, nested_mean
from flowgrpo.training.advantages.tree_credit import TreePaths, depthwise_units, nested_units, subtree_means

# Two trees of one group, each a start with one edge, which splits into two, of which each splits into two.
PARENT = (None, 0, 1, 1, 2, 2, 3, 3)
LINES = ((4, 2, 1), (5, 2, 1), (6, 3, 1), (7, 3, 1))
PATHS = TreePaths(
    parent=(*PARENT, *(None if p is None else p + 8 for p in PARENT)),
    step=(0, 1, 2, 2, 3, 3, 3, 3) * 2,
    group=(0,) * 16,
    root=(0,) * 8 + (1,) * 8,
    lines=(*LINES, *(tuple(edge + 8 for edge in line) for line in LINES)),
)
REWARDS = torch.tensor([0.2, 1.0, -0.6, 0.7, 0.1, 0.4, 2.0, -1.0], dtype=torch.float64)
FIRST = {1, 9}  # edges whose siblings are in the other tree


def advantages(rule, **weights):
    chosen = {"group": 0.0, "between": 0.0, "siblings": 0.0, **weights}
    units = nested_units(PATHS, REWARDS[:, None], edges=PATHS.edges, depth=3, starts=FIRST, **chosen)
    found = rule(units.values[:, 0], units.comparison, units.nested, std="none")
    return dict(zip(PATHS.edges, found.tolist(), strict=True))


def values():
    return subtree_means(PATHS, REWARDS[:, None])[:, 0].tolist()


def test_along_a_path_the_differences_of_values_sum_to_the_reward_less_the_value_of_the_start():
    """TEMPO's identity: with means that include the edge, V(child) - V(parent) are the deviations from its siblings."""
    found, mean = advantages(nested_mean, siblings=1.0), float(REWARDS.mean())
    for line, reward in zip(PATHS.lines, REWARDS.tolist(), strict=True):
        assert sum(found[edge] for edge in line) == pytest.approx(reward - mean)


def test_siblings_and_depths_are_single_levels():
    value, siblings, depth = values(), advantages(nested_mean, siblings=1.0), advantages(nested_mean, group=1.0)
    assert siblings[4] == pytest.approx(value[4] - value[2])
    assert siblings[1] == pytest.approx(value[1] - (value[1] + value[9]) / 2)
    assert depth[4] == pytest.approx(value[4] - float(REWARDS.mean()))
    mixed = advantages(nested_mean, siblings=1.0, group=3.0)
    assert mixed == pytest.approx({edge: (siblings[edge] + 3 * depth[edge]) / 4 for edge in siblings})


def test_a_mean_of_the_others_leaves_the_edge_s_own_leaves_out():
    value, found = values(), advantages(nested_leave_one_out, siblings=1.0)
    assert found[4] == pytest.approx(value[4] - value[5])
    assert found[1] == pytest.approx(value[1] - value[9])


def test_fused_credit_is_the_sum_of_its_leaves():
    """Credit of the ends, copied to all edges of a path, sums to n_b (V - mean) on an edge with n_b leaves below it."""
    units = depthwise_units(PATHS, REWARDS[:, None])
    by_depth = GroupMean(std="none").advantages(units.values, torch.ones(1).double(), units.comparison).tolist()
    deviations = REWARDS - REWARDS.mean()
    for edge, advantage in zip(PATHS.edges, by_depth, strict=True):
        below = [leaf for leaf, line in enumerate(PATHS.lines) if edge in line]
        assert len(below) * advantage == pytest.approx(float(deviations[below].sum()))


def test_families_lie_between_the_tree_and_the_siblings():
    units = nested_units(
        PATHS, REWARDS[:, None], edges=PATHS.edges, depth=3, group=1.0, between=1.0, siblings=1.0, starts=FIRST
    )
    place = PATHS.edges.index(4)
    assert units.nested.members[place].tolist() == [[-1, -1], [0, 0], [0, -1], [0, -1], [0, 2]]
    assert units.nested.weight[place].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_an_unknown_reward_leaves_the_others_of_its_branch():
    rewards = REWARDS.clone()
    rewards[0] = torch.nan
    value = subtree_means(PATHS, rewards[:, None])[:, 0]
    assert value[2] == rewards[1]
    assert value[4].isnan()
