"""Credit of whole trajectories, and of branches that are finished by ODE."""

import statistics

import pytest
import torch
from credited import SDE, column, tree, valued

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit.rules import (
    siblings,
    terminal,
)
from flowgrpo.training.advantages.baseline import group_mean
from samplers.plans import brush, chain, twigs
from samplers.trees import TWIG, Move


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
