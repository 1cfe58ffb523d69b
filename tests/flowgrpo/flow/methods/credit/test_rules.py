"""Credit of whole trajectories, of branches that ODE finishes, and of trees whose nodes have the mean of their leaves."""

import math
import statistics

import pytest
import torch
from credited import SDE, by_path, column, drawn, sets, tree, valued

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit.rules import Depthwise, DiscountedValue, Siblings, StepGain, Terminal
from flowgrpo.training.advantages.baseline import group_mean
from samplers.kernels import Kernel
from samplers.plans import branch, brush, chain, twigs
from samplers.trees import TWIG, Move

NAN = math.nan
ONE = torch.ones(1, dtype=torch.float64)


def test_every_edge_of_a_chain_belongs_to_its_own_end():
    grown = tree(chain([SDE] * 3, (0, 1), (0, 1)))
    rewards = torch.arange(6, dtype=torch.float64).reshape(6, 1)
    units = Terminal().units(grown, rewards, ONE)
    assert units.values[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    for node, of in zip(grown.nodes, units.of_edge.tolist(), strict=True):
        assert of == -1 if node.parent is None else grown.nodes[grown.leaves[of]].root == node.root


CHAINS = [chain([SDE] * 3, steps, steps) for steps in ((0, 1), (0, 1, 2))]


@pytest.mark.parametrize(
    ("credit", "plan", "told"),
    [
        (Terminal(), lambda role, step: (Move(SDE, count=2 if step == 1 else 1),), "share no edge"),
        *((Siblings(), plan, "such as brush") for plan in CHAINS),
        *((StepGain(), plan, "twigs with root: true") for plan in (CHAINS[0], twigs([SDE] * 3, (0, 1), None, False))),
        (DiscountedValue(), CHAINS[0], "value of every state"),
        (DiscountedValue(), brush([SDE] * 3, [2, 2, 0]), "needs chains"),
        (DiscountedValue(), lambda role, step: (Move(SDE, count=2), Move(role=TWIG, ode_stops=(3,))), "needs chains"),
    ],
)
def test_a_tree_of_another_shape_is_refused(credit, plan, told):
    grown = tree(plan, 1, 1)
    with pytest.raises(InputError, match=told):
        credit.units(grown, torch.ones(len(grown.leaves), 1, dtype=torch.float64), ONE)


def test_a_twig_is_no_trajectory():
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=1, size=2)
    assert len(grown.leaves) == 6
    units = Terminal().units(grown, valued(grown, [[1, 2, 3], [4, 5, 6]]), ONE)
    assert units.values[:, 0].tolist() == [3, 6]
    assert units.comparison.tolist() == [[10], [10]]
    for node, of in zip(grown.nodes, units.of_edge.tolist(), strict=True):
        assert of == (-1 if node.parent is None or node.role == TWIG else node.root.index)


@pytest.mark.parametrize(("within", "size"), [("seed", 2), ("prompt", 4)])
def test_a_branch_has_the_reward_of_its_end_compared_with_its_seed_s_or_all_of_its_step(within, size):
    """Two groups of two seeds, two branches at either step; rewards by group, seed, step and branch."""
    grown = tree(brush([SDE] * 3, [2, 2, 0]), groups=2, size=2)
    edges = [[i for i in grown.ancestry(leaf) if grown.nodes[i].role == "side"][-1] for leaf in grown.leaves]
    nodes = [grown.nodes[edge] for edge in edges]
    rewards = [1000.0 * n.root.group + 100 * n.root.index**2 + 10 * n.step + 3 * n.path[-1] for n in nodes]
    units = Siblings(within=within).units(grown, column(rewards), ONE)
    table = dict(zip(edges, rewards, strict=True))
    assert len(units.values) == len(table) == 16
    for node, of in enumerate(units.of_edge.tolist()):
        assert (units.values[of].item() if of >= 0 else None) == table.get(node)
    assert units.weight.tolist() == [1.0] * 16
    found = group_mean(units.values[:, 0], units.comparison, std="group", eps=0.0, ddof=0)
    for edge, node, reward in zip(edges, nodes, rewards, strict=True):
        alike = [(n.root.group, n.step, within == "prompt" or n.parent == node.parent) for n in nodes]
        others = [own for own, key in zip(rewards, alike, strict=True) if key == (node.root.group, node.step, True)]
        assert len(others) == size
        expected = (reward - statistics.fmean(others)) / statistics.pstdev(others)
        assert found[units.of_edge[edge]].item() == pytest.approx(expected)


def split_twice(kernel=SDE):
    """Two children at the first and second step, then ODE: leaves (0, 0), (0, 1), (1, 0), (1, 1)."""
    return branch([kernel] * 3, (0, 1), 2, stochastic=(0, 1), trained=(0, 1), sibling_strength=None, noise_scale=1.0)


def test_a_node_has_the_mean_of_its_leaves_and_a_lost_one_is_left_out():
    grown = tree(split_twice(), 1, 1)
    assert [grown.nodes[leaf].path[1:] for leaf in grown.leaves] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    rewards = torch.tensor([[1.0, NAN], [3.0, NAN], [NAN, 7.0], [10.0, 9.0]], dtype=torch.float64)
    units = Depthwise().units(grown, rewards, ONE)
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
    units = Depthwise().units(grown, column([rewards[grown.nodes[leaf].path[1:]] for leaf in grown.leaves]), ONE)
    assert by_path(grown, units, units.values[:, 0].tolist()) == pytest.approx(
        {((), 1): 5, ((0,), 2): 3, ((1,), 2): 9, ((0, 0), 3): 0, ((0, 1), 3): 6, ((1,), 3): 9}
    )


def test_depths_are_compared_within_a_group():
    grown = tree(split_twice(), groups=2, size=2)
    units = Depthwise().units(grown, column([float(i) for i in range(16)]), ONE)
    assert units.comparison.unique(dim=0).tolist() == [[g, step] for g in (10, 11) for step in (1, 2, 3)]
    assert sets(units) == [4, 8, 8] * 2


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lost", [-2.0, NAN])
def test_path_weights_are_a_softmax_of_summed_log_probs(form, beta, lost):
    """Siblings of a step have one std, so paths differ in probability by exp(-|noise|^2 / 2) of their own edges."""
    grown = tree(split_twice(Kernel("dance_sde", 0.3, form)), 1, 1)
    rewards = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): lost, (1, 1): 10.0}
    units = Depthwise(weights="path", beta=beta).units(grown, column(list(rewards.values())), ONE)

    def likelihood(path):
        noise = torch.cat([drawn((2,), 10, (0, *path[: k + 1]), k, 0) for k in range(len(path))])
        return math.exp(-beta * noise.double().square().sum().item() / 2)

    for (path, _), value in by_path(grown, units, units.values[:, 0].tolist()).items():
        below = {leaf: likelihood(leaf) for leaf in rewards if leaf[: len(path)] == path and rewards[leaf] > -3}
        whole = sum(below.values()) or NAN
        expected = sum(rewards[leaf] * weight for leaf, weight in below.items()) / whole
        assert value == pytest.approx(expected, abs=1e-4, nan_ok=True)
    spread = by_path(grown, units, units.values[:, 0].tolist())[(0,), 1] - 2.0
    assert abs(spread) < 1e-9 if beta == 0 else abs(spread) > 1e-2


def test_path_weights_need_a_density():
    grown = tree(split_twice(Kernel("cps", 0.5, "constant_free")), 1, 1)
    with pytest.raises(InputError, match="log_prob mean or sum"):
        Depthwise(weights="path").units(grown, column([0.0] * 4), ONE)
    assert Depthwise().units(grown, column([1.0] * 4), ONE).values.unique().tolist() == [1]


@pytest.mark.parametrize("gap", [1e-3, 5.0])
def test_two_nodes_of_a_depth_are_one_over_root_two_from_zero_and_one_is_zero(gap):
    late = branch([SDE] * 3, (1,), 2, stochastic=(0, 1), trained=(0, 1), sibling_strength=None, noise_scale=1.0)
    grown = tree(late, 1, 1)
    units = Depthwise().units(grown, column([1.0, 1.0 + gap]), ONE)
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
    units = Depthwise().units(grown, column(rewards), ONE)
    values = group_mean(units.values[:, 0], units.comparison, std="group", eps=1e-8, ddof=1)
    found = by_path(grown, units, values.tolist())
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert found == pytest.approx({((i,), s): (r - mean) / std for i, r in enumerate(rewards) for s in (1, 2, 3)})
