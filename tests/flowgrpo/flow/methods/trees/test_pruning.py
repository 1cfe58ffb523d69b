import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowgrpo.flow.methods.trees.pruning import extremes, parent_top1
from flowgrpo.flow.methods.trees.tree import Branch, Pruning
from samplers.growth import grow
from samplers.kernels import Kernel
from samplers.pruning import prune
from samplers.schedule import linear_sigmas
from samplers.trees import TRUNK, Root

KERNELS = (Kernel("dance_sde", 0.3),) * 20
LAST_SPLIT = 9  # of 0, 3, 6, 9


def grown(groups=1, size=16, tree=None):
    """BranchGRPO's trees, over states of one number."""
    tree = tree or Branch()
    roots = [Root(10 + g, i, None) for g in range(groups) for i in range(tree.roots(size))]
    start = (torch.zeros(len(roots), 1),)
    plan, sigmas = tree.plan(KERNELS, size, 0, 0), linear_sigmas(20, 3.0).tolist()
    return grow(plan, sigmas, roots, start, lambda x, *_: x, lambda shape, *address: torch.ones(shape), 64)


ONE_TREE = grown()


def advantages(tree, rewards):
    """Of each node, as if all leaves below it had earned it alike."""
    summed, count = torch.zeros(len(tree.nodes)), torch.zeros(len(tree.nodes))
    for leaf, reward in zip(tree.leaves, rewards, strict=True):
        line = tree.ancestry(leaf)
        summed[line] += reward
        count[line] += 1
    return summed / count.clamp(min=1)


def kept_leaves(tree, keep):
    """Places of the leaves whose chain stays, by the address of their last edge; every chain is whole or gone."""
    kept = []
    for place, leaf in enumerate(tree.leaves):
        chain = [i for i in tree.ancestry(leaf) if tree.nodes[i].step > LAST_SPLIT + 1]
        assert len(chain) == 10
        assert len(set(keep[chain].tolist())) == 1
        if keep[leaf]:
            kept.append(place)
    return kept


def edges(tree, keep):
    return sum(bool(keep[i]) for i, node in enumerate(tree.nodes) if node.parent is not None)


SEVERAL = [[3.0, 7, 1, 2, 9, 8, 5, 5, -1, -2, 0, 4, 6, -7, 11, 10], [float(i) for i in range(16)]]


@pytest.mark.parametrize("rewards", SEVERAL)
def test_the_better_chain_of_a_split_stays_or_the_best_and_the_worst_quarter_of_all(rewards):
    earned = advantages(ONE_TREE, rewards)
    better = [i if rewards[i] >= rewards[i + 1] else i + 1 for i in range(0, 16, 2)]  # of equal ones the first
    assert kept_leaves(ONE_TREE, parent_top1(ONE_TREE, earned)) == better
    ranked = sorted(range(16), key=lambda i: rewards[i])
    assert kept_leaves(ONE_TREE, extremes(ONE_TREE, earned, 0.25)) == sorted(ranked[:4] + ranked[-4:])


LOST = {0, 3, 5, 6, 7, 14}


def test_a_chain_whose_reward_was_lost_is_neither_good_nor_bad():
    earned = advantages(ONE_TREE, [math.nan if i in LOST else float(i) for i in range(16)])
    # of two lost ones the first
    assert kept_leaves(ONE_TREE, parent_top1(ONE_TREE, earned)) == [1, 2, 4, 6, 9, 11, 13, 15]
    # ten are known: 15 13 12 11 10 | 9 8 4 2 1
    assert kept_leaves(ONE_TREE, extremes(ONE_TREE, earned, 0.25)) == [1, 2, 4, 8, 11, 12, 13, 15]
    # with 13 lost: 9 8 | 0 ... 15 | 4
    few = advantages(ONE_TREE, [float(i) if i in (4, 8, 9) else math.nan for i in range(16)])
    assert kept_leaves(ONE_TREE, extremes(ONE_TREE, few, 0.125)) == [4, 8, 9, 15]
    assert edges(ONE_TREE, extremes(ONE_TREE, few, 0.25)) == 138


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=16, max_size=16))
@example([1.0] * 16)
@example([0.0] * 15 + [1.0])
def test_equally_many_edges_stay_whatever_the_rewards(rewards):
    earned = advantages(ONE_TREE, rewards)
    for keep in (parent_top1(ONE_TREE, earned), extremes(ONE_TREE, earned, 0.25)):
        assert edges(ONE_TREE, keep) == 138  # 8.625 for each leaf
        assert all(keep[i] for i, node in enumerate(ONE_TREE.nodes) if node.step <= LAST_SPLIT + 1)  # the split's too
        assert len(kept_leaves(ONE_TREE, keep)) == 8


@pytest.mark.parametrize("rule", ["parent_top1", "extremes"])
def test_the_update_has_the_trained_edges_that_stay(rule):
    tree = Branch(prune=Pruning(rule=rule))
    keep = tree.kept_edges(ONE_TREE, advantages(ONE_TREE, SEVERAL[0]))
    left = prune(ONE_TREE, keep, 4)
    trained = torch.cat([edges.nodes for evaluation in left.evaluations for edges in evaluation.trained])
    # 138 edges without the last, ODE, ones of eight chains.
    assert sorted(trained.tolist()) == [i for i, node in enumerate(ONE_TREE.nodes) if keep[i] and 0 < node.step < 20]
    assert len(trained) == 130
    assert max(len(evaluation.rows) for evaluation in left.evaluations) == 4


@pytest.mark.parametrize("fraction", [0.01, 0.125, 0.375])
def test_the_fraction_is_of_the_chains_at_either_end(fraction):
    tree = Branch(prune=Pruning(rule="extremes", fraction=fraction))
    keep = tree.kept_edges(ONE_TREE, advantages(ONE_TREE, SEVERAL[1]))
    count = max(1, int(fraction * 16))  # one at either end at least
    assert kept_leaves(ONE_TREE, keep) == [i for i in range(16) if i < count or i >= 16 - count]


def test_each_group_has_its_own_extremes():
    three = grown(groups=3)
    groups = [three.nodes[leaf].root.group for leaf in three.leaves]
    rewards = [100.0 * group + three.nodes[leaf].path[-1] for group, leaf in zip(groups, three.leaves, strict=True)]
    for keep in (extremes(three, advantages(three, rewards), 0.25), parent_top1(three, advantages(three, rewards))):
        kept = [groups[place] for place in kept_leaves(three, keep)]
        assert [kept.count(group) for group in (10, 11, 12)] == [8, 8, 8]
        assert edges(three, keep) == 3 * 138


def test_the_trees_of_one_group_compete_for_extremes_but_not_at_their_splits():
    two = grown(size=32)  # two trees of 16 leaves
    assert {two.nodes[leaf].root.index for leaf in two.leaves} == {0, 1}
    rewards = [100.0 * (k % 2) * (-1) ** (k // 2 % 2) * two.nodes[leaf].root.index for k, leaf in enumerate(two.leaves)]
    earned = advantages(two, rewards)

    def of(keep):
        return [two.nodes[two.leaves[place]].root.index for place in kept_leaves(two, keep)]

    assert of(parent_top1(two, earned)).count(1) == 8
    # Of the second tree 4 leaves have 100, 4 have -100 and 8 have 0, as all of the first have.
    kept = of(extremes(two, earned, 0.125))
    assert kept.count(1) == 8
    assert kept.count(0) == 0


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_one_child_of_a_split_stays_whatever_their_number(factor):
    tree = grown(size=factor, tree=Branch(factor=factor, splits=[LAST_SPLIT]))
    keep = parent_top1(tree, advantages(tree, [float(-abs(i - 1)) for i in range(factor)]))
    assert kept_leaves(tree, keep) == [1]
    assert edges(tree, keep) == 9 + factor + 10


def test_the_untrained_window_has_its_own_size_and_pace_and_never_holds_a_split():
    def untrained(iteration, **options):
        plan = Branch(prune=Pruning(rule="depth", **options)).plan(KERNELS, 16, 0, iteration)
        return [step for step in range(19) if not plan(TRUNK, step)[0].trained]

    assert untrained(0, size=5) == [13, 14, 15, 16, 17]
    assert untrained(7, size=2, every=2) == [13, 14]
    for iteration in (0, 50, 5000):
        assert untrained(iteration, size=19) == list(range(10, 19))


def test_a_depth_window_of_five_leaves_as_many_edges_as_half_the_chains():
    tree = grown(tree=Branch(prune=Pruning(rule="depth", size=5)))
    trained = sum(len(edges.nodes) for evaluation in tree.evaluations for edges in evaluation.trained)
    assert trained + 16 == 138  # and the last, ODE, edge of each leaf
    for rule in (None, Pruning(rule="depth")):  # by which every chain stays
        assert Branch(prune=rule).kept_edges(ONE_TREE, torch.zeros(len(ONE_TREE.nodes))) is None
