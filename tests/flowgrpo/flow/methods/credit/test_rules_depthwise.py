"""Credit of a tree whose nodes have the mean of their leaves, compared at their depth."""

import math
import statistics

import pytest
import torch
from credited import SDE, by_path, column, drawn, sets, tree

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit.rules import (
    depthwise,
)
from flowgrpo.training.advantages.baseline import group_mean
from samplers.kernels import Kernel
from samplers.plans import branch
from samplers.trees import Move

NAN = math.nan


def split_twice(kernel=SDE):
    """Two children at the first and second step, then ODE: leaves (0, 0), (0, 1), (1, 0), (1, 1)."""
    return branch([kernel] * 3, (0, 1), 2, stochastic=(0, 1), trained=(0, 1), sibling_strength=None, noise_scale=1.0)


def test_a_node_has_the_mean_of_its_leaves_and_a_lost_one_is_left_out():
    grown = tree(split_twice(), 1, 1)
    assert [grown.nodes[leaf].path[1:] for leaf in grown.leaves] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    rewards = torch.tensor([[1.0, NAN], [3.0, NAN], [NAN, 7.0], [10.0, 9.0]], dtype=torch.float64)
    units = depthwise(grown, rewards)
    leaves = {(0, 0): (1, NAN), (0, 1): (3, NAN), (1, 0): (NAN, 7), (1, 1): (10, 9)}
    expected = {((0,), 1): (2, NAN), ((1,), 1): (10, 8)}
    expected |= {(path, step): pair for path, pair in leaves.items() for step in (2, 3)}
    assert by_path(grown, units, units.values.tolist()).keys() == expected.keys()
    for place, pair in by_path(grown, units, units.values.tolist()).items():
        assert pair == pytest.approx(expected[place], nan_ok=True)
    assert sorted(sets(units)) == [2, 4, 4]


def test_leaves_count_alike_however_they_are_spread():
    """One child of a node has two leaves, the other one: (0 + 6 + 9) / 3 is not the mean of 3 and 9."""

    def uneven(role, step):
        if step == 1:
            return (Move(SDE, role="twice"), Move(SDE, role="once"))
        return (Move(SDE, role=role, count=2 if role == "twice" else 1),)

    grown = tree(uneven, 1, 1)
    rewards = {(0, 0): 0.0, (0, 1): 6.0, (1,): 9.0}
    units = depthwise(grown, column([rewards[grown.nodes[leaf].path[1:]] for leaf in grown.leaves]))
    assert by_path(grown, units, units.values[:, 0].tolist()) == pytest.approx(
        {((), 1): 5, ((0,), 2): 3, ((1,), 2): 9, ((0, 0), 3): 0, ((0, 1), 3): 6, ((1,), 3): 9}
    )


def test_depths_are_compared_within_a_group():
    grown = tree(split_twice(), groups=2, size=2)
    units = depthwise(grown, column([float(i) for i in range(16)]))
    assert units.comparison.unique(dim=0).tolist() == [[g, step] for g in (10, 11) for step in (1, 2, 3)]
    assert sets(units) == [4, 8, 8] * 2


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_path_weights_are_a_softmax_of_summed_log_probs(form, beta):
    """Siblings of a step have one std, so paths differ in probability by exp(-|noise|^2 / 2) of their own edges."""
    grown = tree(split_twice(Kernel("dance_sde", 0.3, form)), 1, 1)
    rewards = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): -2.0, (1, 1): 10.0}
    units = depthwise(grown, column(list(rewards.values())), "path", beta)

    def likelihood(path):
        noise = torch.cat([drawn((2,), 10, (0, *path[: k + 1]), k, 0) for k in range(len(path))])
        return math.exp(-beta * noise.double().square().sum().item() / 2)

    for (path, _), value in by_path(grown, units, units.values[:, 0].tolist()).items():
        below = {leaf: likelihood(leaf) for leaf in rewards if leaf[: len(path)] == path}
        expected = sum(rewards[leaf] * weight for leaf, weight in below.items()) / sum(below.values())
        assert value == pytest.approx(expected, abs=1e-4)
    spread = by_path(grown, units, units.values[:, 0].tolist())[(0,), 1] - 2.0
    assert abs(spread) < 1e-9 if beta == 0 else abs(spread) > 1e-2


@pytest.mark.parametrize(("form", "factor"), [("mean", 2), ("sum", 1)])
def test_path_weights_are_those_of_the_recorded_log_probs(form, factor):
    grown = tree(split_twice(Kernel("dance_sde", 0.3, form)), 1, 1)
    recorded = {
        node: factor * value
        for evaluation in grown.evaluations
        for edges in evaluation.edges
        if edges.log_prob is not None
        for node, value in zip(edges.nodes.tolist(), edges.log_prob.tolist(), strict=True)
    }
    rewards = [1.0, 3.0, NAN, 10.0]
    units = depthwise(grown, column(rewards), "path", 0.7)
    for edge, unit in enumerate(units.of_edge.tolist()):
        if unit < 0:
            continue
        weights = {}
        for leaf, reward in zip(grown.leaves, rewards, strict=True):
            line = grown.ancestry(leaf)
            if edge in line and not math.isnan(reward):
                weights[reward] = math.exp(0.7 * sum(recorded.get(i, 0) for i in line[: line.index(edge)]))
        expected = sum(r * w for r, w in weights.items()) / sum(weights.values()) if weights else NAN
        assert units.values[unit].item() == pytest.approx(expected, nan_ok=True)


def test_path_weights_need_a_density():
    grown = tree(split_twice(Kernel("cps", 0.5, "constant_free")), 1, 1)
    with pytest.raises(InputError, match="log_prob mean or sum"):
        depthwise(grown, column([0.0] * 4), "path")
    assert depthwise(grown, column([1.0] * 4)).values.unique().tolist() == [1]


def test_two_nodes_of_a_depth_are_one_over_root_two_from_zero_and_one_is_zero():
    late = branch([SDE] * 3, (1,), 2, stochastic=(0, 1), trained=(0, 1), sibling_strength=None, noise_scale=1.0)
    for gap in (1e-3, 5.0):
        grown = tree(late, 1, 1)
        units = depthwise(grown, column([1.0, 1.0 + gap]))
        found = group_mean(units.values[:, 0], units.comparison, std="group", eps=1e-8, ddof=1).tolist()
        half = pytest.approx(math.sqrt(0.5), rel=1e-4)
        below = {place: value for place, value in by_path(grown, units, found).items() if place[0]}
        assert by_path(grown, units, found)[(), 1] == 0
        assert {place: -value if place[0] == (0,) else value for place, value in below.items()} == dict.fromkeys(
            [((i,), step) for i in (0, 1) for step in (2, 3)], half
        )


def test_below_the_last_split_edges_have_the_advantage_of_their_leaf():
    early = branch([SDE] * 3, (0,), 4, stochastic=(0, 1), trained=(0, 1), sibling_strength=4.0, noise_scale=1.0)
    grown = tree(early, 1, 1)
    rewards = [1.0, 4.0, 2.5, -3.0]
    units = depthwise(grown, column(rewards))
    found = by_path(
        grown, units, group_mean(units.values[:, 0], units.comparison, std="group", eps=1e-8, ddof=1).tolist()
    )
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert found == pytest.approx({((i,), s): (r - mean) / std for i, r in enumerate(rewards) for s in (1, 2, 3)})
