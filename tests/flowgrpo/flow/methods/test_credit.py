import math
import statistics

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit import (
    calibrated,
    depthwise,
    discounted_value,
    siblings,
    state_values,
    step_gain,
    step_signs,
    terminal,
)
from flowgrpo.training.baseline import GroupMean, group_mean
from samplers.kernels import Kernel
from samplers.plans import branch, brush, chain, twigs
from samplers.trees import TRUNK, TWIG, Move, Root, grow

SIGMAS = (1.0, 0.75, 0.5, 0.0)
SDE = Kernel("dance_sde", 0.3)
NAN = math.nan
ONE = torch.ones(1, dtype=torch.float64)


def drawn(shape, group, path, step, component):
    """Numbers that differ from edge to edge."""
    return torch.tensor([math.sin(1 + 3 * sum(path) + 5 * step + 7 * len(path) + k) for k in range(shape[0])])


def tree(plan, groups=2, size=3):
    roots = [Root(10 + g, i, None) for g in range(groups) for i in range(size)]
    start = (torch.zeros(len(roots), 2),)
    return grow(plan, SIGMAS, roots, start, lambda x, sigma, rows: x, drawn, 4)


def column(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def left_trunk(grown, leaf):
    """The step at which a leaf's way left the trunk by a twig, or the last of all."""
    on_twig = [i for i in grown.ancestry(leaf) if grown.nodes[i].role == TWIG]
    return grown.nodes[grown.nodes[on_twig[-1]].parent].step if on_twig else len(SIGMAS) - 1


def valued(grown, values):
    """Rewards with which the state of each start at step k has the value values[start][k]; the end comes last."""
    ends = [(grown.nodes[leaf].root, left_trunk(grown, leaf)) for leaf in grown.leaves]
    return column([values[root.index][min(step, len(values[root.index]) - 1)] for root, step in ends])


def by_edge(grown, units, of):
    """What is `of` the unit of each edge that has one, by the start and the step it arrives at."""
    return {
        (node.root.group, node.root.index, node.step): of[unit]
        for node, unit in zip(grown.nodes, units.of_edge.tolist(), strict=True)
        if unit >= 0
    }


def by_path(grown, units, of):
    """The same by the path and step of the edge's child, for one start."""
    return {
        (node.path[1:], node.step): of[unit]
        for node, unit in zip(grown.nodes, units.of_edge.tolist(), strict=True)
        if unit >= 0
    }


def sets(units):
    """How large each set of comparison is."""
    return units.comparison.unique(dim=0, return_counts=True)[1].tolist()


def split_twice(kernel=SDE):
    """Two children at the first and second step, then ODE: leaves (0, 0), (0, 1), (1, 0), (1, 1)."""
    return branch([kernel] * 3, (0, 1), 2, stochastic=(0, 1), trained=(0, 1), sibling_strength=None, noise_scale=1.0)


def test_every_edge_of_a_chain_belongs_to_its_own_end():
    grown = tree(chain([SDE] * 3, (0, 1), (0, 1)))
    rewards = torch.arange(6, dtype=torch.float64).reshape(6, 1)
    units = terminal(grown, rewards)
    assert units.values[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    for node, of in enumerate(units.of_edge.tolist()):
        if grown.nodes[node].parent is None:
            assert of == -1
        else:
            leaf = grown.nodes[grown.leaves[of]]
            assert leaf.root == grown.nodes[node].root
    assert sorted(units.of_edge[units.of_edge >= 0].tolist()) == sorted(list(range(6)) * 3)


def test_a_tree_that_branches_is_refused():
    grown = tree(lambda role, step: (Move(SDE, count=2),) if step == 1 else (Move(SDE),))
    with pytest.raises(InputError, match="share no edge"):
        terminal(grown, torch.zeros(len(grown.leaves), 1, dtype=torch.float64))


def test_a_twig_is_no_trajectory():
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=1, size=2)
    assert len(grown.leaves) == 6
    units = terminal(grown, valued(grown, [[1, 2, 3], [4, 5, 6]]))
    assert units.values[:, 0].tolist() == [3, 6]
    assert units.comparison.tolist() == [[10], [10]]
    for node, of in zip(grown.nodes, units.of_edge.tolist(), strict=True):
        assert of == (-1 if node.parent is None or node.role == TWIG else node.root.index)


def brushed():
    """Two groups of two seeds, two branches at either step; rewards by group, seed, step and branch."""
    grown = tree(brush([SDE] * 3, [2, 2, 0]), groups=2, size=2)
    table = {}
    for leaf in grown.leaves:
        edge = [i for i in grown.ancestry(leaf) if grown.nodes[i].role == "side"][-1]
        node = grown.nodes[edge]
        table[edge] = 1000.0 * node.root.group + 100 * node.root.index**2 + 10 * node.step + 3 * node.path[-1]
    return grown, table


def leaf_rewards(grown, table):
    return column([next(table[i] for i in grown.ancestry(leaf) if i in table) for leaf in grown.leaves])


def test_a_branch_has_the_reward_of_its_end():
    grown, table = brushed()
    units = siblings(grown, leaf_rewards(grown, table))
    assert len(units.values) == len(table) == 16
    for node, of in enumerate(units.of_edge.tolist()):
        assert (units.values[of].item() if of >= 0 else None) == table.get(node)
    assert units.weight.tolist() == [1.0] * 16


def test_seeds_compare_the_children_of_one_state_and_prompts_those_of_a_step():
    grown, table = brushed()
    rewards = leaf_rewards(grown, table)
    for within in ("seed", "prompt"):
        units = siblings(grown, rewards, within)
        found = group_mean(units.values[:, 0], units.comparison, std="group", eps=0.0, ddof=0)
        for edge, reward in table.items():
            node = grown.nodes[edge]
            others = [
                table[other]
                for other in table
                if grown.nodes[other].root.group == node.root.group
                and grown.nodes[other].step == node.step
                and (within == "prompt" or grown.nodes[other].parent == node.parent)
            ]
            assert len(others) == {"seed": 2, "prompt": 4}[within]
            expected = (reward - statistics.fmean(others)) / statistics.pstdev(others)
            assert found[units.of_edge[edge]].item() == pytest.approx(expected)
            if within == "seed":
                assert expected == pytest.approx(-1 if reward == min(others) else 1)


@pytest.mark.parametrize("stochastic", [(0, 1), (0, 1, 2)])
def test_siblings_refuses_a_plain_chain(stochastic):
    grown = tree(chain([SDE] * 3, stochastic, stochastic))
    with pytest.raises(InputError, match="such as brush"):
        siblings(grown, torch.zeros(len(grown.leaves), 1, dtype=torch.float64))


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


@pytest.mark.parametrize("stochastic", [(0, 1), (0, 1, 2)])
@pytest.mark.parametrize("length", [None, 1])
def test_gains_add_up_to_the_value_of_the_end_minus_that_of_the_start(stochastic, length):
    grown = tree(twigs([SDE] * 3, stochastic, length, True), groups=1, size=2)
    values = [[1.0, 5.0, 2.0], [0.0, -1.0, 0.5]]
    if len(stochastic) == 3:
        values = [[*line, 7.0] for line in values]
    units = step_gain(grown, valued(grown, values))
    expected = {
        (10, start, step + 1): values[start][step + 1] - values[start][step] for start in (0, 1) for step in stochastic
    }
    gains = by_edge(grown, units, units.values[:, 0].tolist())
    assert gains == pytest.approx(expected)
    for start in (0, 1):
        total = sum(gain for place, gain in gains.items() if place[1] == start)
        assert total == pytest.approx(values[start][-1] - values[start][0])
    twig_edges = [i for i, node in enumerate(grown.nodes) if node.role == TWIG]
    assert units.of_edge[twig_edges].tolist() == [-1] * len(twig_edges)


def test_gains_are_compared_at_their_step_or_jointly():
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=2, size=3)
    rewards = torch.zeros(len(grown.leaves), 1, dtype=torch.float64)
    assert step_gain(grown, rewards).comparison.unique(dim=0).tolist() == [[10, 1], [10, 2], [11, 1], [11, 2]]
    assert sets(step_gain(grown, rewards)) == [3] * 4
    assert step_gain(grown, rewards, "joint").comparison.unique(dim=0).tolist() == [[10, 0], [11, 0]]
    assert sets(step_gain(grown, rewards, "joint")) == [6] * 2


def test_joint_comparison_leaves_the_larger_gains_larger():
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=1, size=2)
    rewards = valued(grown, [[0, 10, 11], [0, -10, -11]])  # gains 10 and 1, -10 and -1

    def advantages(compare):
        units = step_gain(grown, rewards, compare)
        return by_edge(
            grown, units, group_mean(units.values[:, 0], units.comparison, std="group", eps=0.0, ddof=0).tolist()
        )

    assert advantages("step") == pytest.approx({(10, 0, 1): 1, (10, 0, 2): 1, (10, 1, 1): -1, (10, 1, 2): -1})
    std = math.sqrt((100 + 1) / 2)
    assert advantages("joint") == pytest.approx(
        {(10, 0, 1): 10 / std, (10, 0, 2): 1 / std, (10, 1, 1): -10 / std, (10, 1, 2): -1 / std}
    )


def test_gains_need_the_value_of_every_state():
    for plan in (chain([SDE] * 3, (0, 1), (0, 1)), twigs([SDE] * 3, (0, 1), None, False)):
        grown = tree(plan)
        with pytest.raises(InputError, match="twigs with root: true"):
            step_gain(grown, torch.zeros(len(grown.leaves), 1, dtype=torch.float64))


def judged(values, discount=0.5, anchor=0.1, anchored_steps=2, root=False):
    """Chains of three stochastic steps, whose states have values[start][1:]."""
    grown = tree(twigs([SDE] * 3, (0, 1, 2), 1, root), groups=1, size=len(values))
    return grown, discounted_value(
        grown, valued(grown, values), ONE, discount=discount, anchor=anchor, anchored_steps=anchored_steps
    )


@pytest.mark.parametrize("root", [False, True])
def test_the_value_to_come_is_discounted_and_knows_nothing_of_the_start(root):
    grown, units = judged([[99.0, 4.0, 2.0, 8.0], [99.0, 1.0, 1.0, 1.0]], root=root)
    assert by_edge(grown, units, units.values[:, 0].tolist()) == pytest.approx(
        {
            (10, 0, 1): 4 + 0.5 * 2 + 0.25 * 8,
            (10, 0, 2): 2 + 0.5 * 8,
            (10, 0, 3): 8.0,
            (10, 1, 1): 1.75,
            (10, 1, 2): 1.5,
            (10, 1, 3): 1.0,
        }
    )
    assert units.comparison.unique(dim=0).tolist() == [[10, 1], [10, 2], [10, 3]]


def test_edges_weigh_as_their_value_over_the_mean_of_their_trajectory():
    grown, units = judged([[0, 4.0, 2.0, 8.0], [0, 1.0, 1.0, 1.0]])
    assert by_edge(grown, units, units.weight.tolist()) == pytest.approx(
        {
            (10, 0, 1): 1,  # 7, 6 and 8 have mean 7
            (10, 0, 2): 6 / 7,
            (10, 0, 3): 8 / 7,
            (10, 1, 1): 1.75 * 3 / 4.25,
            (10, 1, 2): 1.5 * 3 / 4.25,
            (10, 1, 3): 1 * 3 / 4.25,
        }
    )


def test_a_value_below_zero_weighs_nothing_unless_all_are():
    grown, units = judged([[0, -1.0, 2.0, 4.0], [0, -1.0, -2.0, -3.0]], discount=0.0)
    assert [by_edge(grown, units, units.weight.tolist())[10, 0, step] for step in (1, 2, 3)] == [0, 1, 2]
    assert [by_edge(grown, units, units.weight.tolist())[10, 1, step] for step in (1, 2, 3)] == [1, 1, 1]


def test_the_weight_is_of_the_weighted_sum_of_the_rewards():
    grown = tree(twigs([SDE] * 3, (0, 1, 2), 1, False), groups=1, size=1)
    rewards = torch.cat([valued(grown, [[0, 1, 2, 3]]), valued(grown, [[0, 5, -3, 1]])], dim=1)
    units = discounted_value(
        grown, rewards, torch.tensor([1.0, 2.0], dtype=torch.float64), discount=0.0, anchor=0.1, anchored_steps=2
    )
    # 1 + 2 * 5, 2 - 2 * 3, which weighs nothing, and 3 + 2 * 1 have mean 16 / 3.
    assert by_edge(grown, units, units.weight.tolist()) == pytest.approx(
        {(10, 0, 1): 11 * 3 / 16, (10, 0, 2): 0, (10, 0, 3): 5 * 3 / 16}
    )


def test_a_lost_value_loses_what_is_summed_up_to_it():
    grown, units = judged([[0, 4.0, NAN, 8.0], [0, 1.0, 1.0, 1.0]])
    assert by_edge(grown, units, units.values[:, 0].tolist()) == pytest.approx(
        {(10, 0, 1): NAN, (10, 0, 2): NAN, (10, 0, 3): 8, (10, 1, 1): 1.75, (10, 1, 2): 1.5, (10, 1, 3): 1}, nan_ok=True
    )
    assert units.weight.isfinite().all()


def test_the_anchor_teaches_the_first_steps_where_a_group_agrees():
    grown, units = judged([[0, 4.0, 2.0, 8.0]] * 3, anchored_steps=2, anchor=0.25)
    plain = GroupMean().advantages(units.values, torch.ones(1).double(), units.comparison)
    anchored = GroupMean().advantages(units.values, torch.ones(1).double(), units.comparison, anchor=units.anchor)
    assert plain.tolist() == [0] * 9
    expected = {(10, start, step): a for start in range(3) for step, a in ((1, 0.25 * 7), (2, 0.25 * 6), (3, 0))}
    assert by_edge(grown, units, anchored.tolist()) == pytest.approx(expected)


def test_discounted_values_need_the_value_of_every_state():
    grown = tree(chain([SDE] * 3, (0, 1), (0, 1)))
    with pytest.raises(InputError, match="value of every state"):
        discounted_value(
            grown,
            torch.zeros(len(grown.leaves), 1, dtype=torch.float64),
            ONE,
            discount=0.9,
            anchor=0.1,
            anchored_steps=5,
        )


@pytest.mark.parametrize(
    "plan",
    [
        brush([SDE] * 3, [2, 2, 0]),
        lambda role, step: (Move(SDE, count=2, trained=True), Move(role=TWIG, ode_stops=(3,))),
    ],
    ids=["brush", "branching twigs"],
)
def test_discounted_values_need_chains(plan):
    grown = tree(plan, 1, 1)
    with pytest.raises(InputError, match="needs chains"):
        discounted_value(
            grown,
            torch.ones(len(grown.leaves), 1, dtype=torch.float64),
            ONE,
            discount=0.9,
            anchor=0.1,
            anchored_steps=5,
        )


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
    value = state_values(grown, column([rewards[grown.nodes[leaf].role] for leaf in grown.leaves]))
    trunk = {node.step: i for i, node in enumerate(grown.nodes) if node.role == TRUNK}
    assert not value.known[trunk[0]]  # its only child is random
    assert [value.of[trunk[step]].item() for step in (1, 2, 3)] == [3, 5, 5]


def test_signs_are_counted_at_their_step():
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=1, size=3)
    rewards = valued(grown, [[0, 1, 5], [0, -1, -2], [0, 2, 2]])
    # Gains of the first step 1, -1, 2; of the second 4, -1, 0; the third is ODE.
    assert step_signs(grown, rewards[:, 0]).tolist() == [[2, 1, 0], [1, 1, 0]]


def test_a_lost_value_has_no_sign():
    grown = tree(twigs([SDE] * 3, (0, 1), None, True), groups=1, size=2)
    rewards = valued(grown, [[0, NAN, 5], [0, 1, 3]])
    assert step_signs(grown, rewards[:, 0]).tolist() == [[1, 1, 0], [0, 0, 0]]


def test_noise_rises_where_signs_balance_and_falls_elsewhere():
    positive, negative = torch.tensor([[12.0, 13.0, 6.0, 14.0, 0.0], [12.0, 11.0, 18.0, 10.0, 0.0]])
    levels = calibrated([0.7, 0.7, 0.7, 0.015, 0.7], positive, negative, step=0.01, balance=2.5 / 24)
    # Differences of 0 and 2 out of 24 are balanced, 12 and 4 are not; no level falls below the step; the last has no gains.
    assert levels == pytest.approx([0.71, 0.71, 0.69, 0.01, 0.7])


def test_noise_does_not_rise_above_the_kernel_s_highest_level():
    even, uneven = torch.tensor([5.0, 5.0, 5.0, 9.0]), torch.tensor([5.0, 5.0, 5.0, 1.0])
    levels = calibrated([0.7, 0.995, 1.0, 1.0], even, uneven, step=0.01, balance=0.1, highest=1.0)
    assert levels == pytest.approx([0.71, 1.0, 1.0, 0.99], abs=1e-12)
    assert max(levels) == 1.0
