"""What each plan visits, counted by hand: evaluations of the model, edges, and samples to decode."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from samplers import noise
from samplers.growth import grow
from samplers.kernels import ODE, Kernel
from samplers.plans import SIDE, branch, brush, chain, twigs
from samplers.schedule import linear_sigmas
from samplers.trees import TRUNK, TWIG, Root

SDE = Kernel("flow_sde", 0.7)


def grown(plan, num_steps=10, roots=1):
    """A tree on states of one number, and how many rows its velocity was asked for."""
    evaluated = []

    def velocity(state, sigma, rows):
        evaluated.extend(rows)
        return tuple(torch.tanh(x) for x in state)

    def edge_noise(shape, *address):
        return noise.noise(shape, "test", *address)

    start = torch.stack([noise.noise((1,), "start", i) for i in range(roots)])
    sigmas = linear_sigmas(num_steps, 3.0).tolist()
    tree = grow(plan, sigmas, [Root(0, i, "row") for i in range(roots)], (start,), velocity, edge_noise, 16)
    return tree, len(evaluated)


def edges_of(tree, **wanted):
    return [
        tree.nodes[node]
        for evaluation in tree.evaluations
        for edges in evaluation.edges
        for node in edges.nodes.tolist()
        if all(getattr(edges.move, key) == value for key, value in wanted.items())
    ]


@pytest.mark.parametrize("trained", [range(9), (2, 5)])
def test_a_chain_evaluates_each_step_once_and_may_train_fewer_than_are_stochastic(trained):
    tree, evaluated = grown(chain([SDE] * 10, range(9), trained), roots=24)
    assert evaluated == 240
    assert len(tree.leaves) == 24
    assert Counter(node.step - 1 for node in edges_of(tree, kernel=SDE)) == dict.fromkeys(range(9), 24)
    assert Counter(node.step - 1 for node in edges_of(tree, trained=True)) == dict.fromkeys(trained, 24)


def test_every_step_of_a_plan_has_its_own_kernel():
    kernels = [Kernel("flow_sde", 0.1 * (step + 1)) for step in range(10)]
    for plan in (
        chain(kernels, range(9), range(9)),
        brush(kernels, [2] * 9 + [0]),
        branch(kernels, (0, 3), 2, stochastic=range(9), trained=range(9), sibling_strength=4.0, noise_scale=1.0),
        twigs(kernels, range(9), 2, True),
    ):
        tree, _ = grown(plan)
        expected = list(zip(kernels[:9], tree.sigmas[:9], strict=True))
        assert [(kernel, sigma) for kernel, sigma, _ in tree.trained_steps] == expected


@pytest.mark.parametrize(
    ("branches", "seeds", "evaluations", "leaves"),
    [
        ([6] * 9 + [0], 1, 279, 54),  # a trunk of 9, and 6 sides with 9, 8, ..., 1 steps left
        ([6] * 9 + [0], 4, 1116, 216),
        ([6] * 10, 1, 280, 60),
        ([6] * 10, 4, 1120, 240),
        ([6] * 4 + [0] * 6, 4, 736, 96),  # 4 (4 + 6 (9 + 8 + 7 + 6))
        ([6, 6, 8, 10, 0, 0, 0, 0, 0, 6], 1, 228, 36),  # 10 + 6 9 + 6 8 + 8 7 + 10 6 + 6 0
        ([0, 0, 2] + [0] * 7, 1, 17, 2),
    ],
)
def test_brush_costs_a_trunk_and_an_ode_tail_per_child(branches, seeds, evaluations, leaves):
    tree, evaluated = grown(brush([SDE] * 10, branches), roots=seeds)
    assert evaluated == evaluations
    assert len(tree.leaves) == leaves == len(edges_of(tree, trained=True))
    counts = {step: seeds * count for step, count in enumerate(branches) if count}
    assert Counter(node.step - 1 for node in edges_of(tree, trained=True)) == counts


@pytest.mark.parametrize(("finish", "evaluations"), [(1, 63), (2, 111), (5, 219), (9, 279), (20, 279), (None, 279)])
def test_a_brush_may_finish_its_branches_in_fewer_steps_and_they_share_the_evaluation_of_its_trunk(finish, evaluations):
    tree, evaluated = grown(brush([SDE] * 10, [6] * 9 + [0], finish))
    assert evaluated == evaluations == 9 + 6 * sum(min(finish or 9, left) for left in range(1, 10))
    assert len(tree.leaves) == 54
    assert {tree.nodes[leaf].role for leaf in tree.leaves} == {SIDE}
    for evaluation in (e for e in tree.evaluations if e.trained):
        assert len(evaluation.rows) == 1  # the trunk's state, apart from the sides at its sigma
        parents = {tree.nodes[tree.nodes[int(i)].parent] for edges in evaluation.edges for i in edges.nodes}
        assert {parent.role for parent in parents} == {TRUNK}
        assert len(parents) == 1


@pytest.mark.parametrize("last", [8, 9])
def test_the_trunk_of_a_brush_is_deterministic_and_never_decoded(last):
    tree, _ = grown(brush([SDE] * 10, [6] * (last + 1) + [0] * (9 - last)), roots=2)
    assert {tree.nodes[leaf].role for leaf in tree.leaves} == {SIDE}
    trunk = edges_of(tree, role=TRUNK)
    assert max(node.step for node in trunk) == last
    assert edges_of(tree, role=TRUNK, kernel=ODE) == trunk
    # Every sample took one stochastic step, and its trunk's and its own ODE steps before and after.
    random = set(edges_of(tree, kernel=SDE))
    assert all(sum(tree.nodes[i] in random for i in tree.ancestry(leaf)) == 1 for leaf in tree.leaves)


@pytest.mark.parametrize(
    ("splits", "evaluations", "edges"),
    [((0, 3, 6, 9), 203, 218), ((0, 4, 8, 12), 169, 184), ((0, 5, 10, 15), 135, 150)],
)
@pytest.mark.parametrize("last_step", ["ode", "sde"])
def test_branches_share_what_comes_before_their_split(splits, evaluations, edges, last_step):
    stochastic = range(20 if last_step == "sde" else 19)
    noises = {"sibling_strength": 4.0, "noise_scale": 1.0}
    plan = branch([SDE] * 20, splits, 2, stochastic=stochastic, trained=stochastic, **noises)
    tree, evaluated = grown(plan, num_steps=20)
    assert evaluated == evaluations
    assert len(edges_of(tree)) == edges == len(tree.nodes) - 1
    assert len(edges_of(tree, trained=True)) == (edges if last_step == "sde" else edges - 16)
    assert len(tree.leaves) == 16
    widths = Counter(node.step for node in edges_of(tree))
    assert widths == {step + 1: 2 ** sum(split <= step for split in splits) for step in range(20)}


def test_only_siblings_of_a_branch_share_noise_or_are_hot():
    options = {"stochastic": range(9), "trained": range(9), "sibling_strength": 4.0, "noise_scale": 2.0}
    tree, _ = grown(branch([SDE] * 10, (0, 3), 3, **options))
    shared = edges_of(tree, sibling_strength=4.0, noise_scale=2.0)
    assert Counter(node.step - 1 for node in shared) == {0: 3, 3: 9}
    assert len(edges_of(tree, sibling_strength=None, noise_scale=1.0)) == len(tree.nodes) - 1 - 12


def test_a_branch_walks_by_ode_outside_its_window_and_trains_what_it_is_told():
    options = {"stochastic": (2, 3, 4, 5), "trained": (3, 4), "sibling_strength": None, "noise_scale": 1.0}
    tree, _ = grown(branch([SDE] * 10, (2, 4), 2, **options))
    assert {node.step - 1 for node in edges_of(tree, kernel=SDE)} == {2, 3, 4, 5}
    assert {node.step - 1 for node in edges_of(tree, kernel=ODE)} == {0, 1, 6, 7, 8, 9}
    assert Counter(node.step - 1 for node in edges_of(tree, trained=True)) == {3: 2, 4: 4}


@pytest.mark.parametrize(
    ("stochastic", "length", "root", "evaluations", "leaves"),
    [
        (9, None, True, 55, 10),  # 10 + 9 + ... + 1; from the last state the chain itself goes on by ODE
        (10, None, True, 55, 11),
        (9, None, False, 46, 9),  # less the 9 steps of the start's own twig after the evaluation they share
        (9, 1, True, 10, 10),
        (10, 1, True, 10, 11),
        (9, 2, True, 19, 10),
        (9, 5, True, 40, 10),  # 10 + 4 for each of steps 0 to 5, then 3, 2, 1
        (4, 2, True, 18, 9),  # 10 + 1 for each of steps 0 to 7; from step 8 the chain takes the same two steps
        (4, None, True, 40, 5),  # 10 + 9 + 8 + 7 + 6; ODE from step 4 on
    ],
)
def test_twigs_share_their_first_evaluation(stochastic, length, root, evaluations, leaves):
    tree, evaluated = grown(twigs([SDE] * 10, range(stochastic), length, root), roots=3)
    assert evaluated == 3 * evaluations
    assert len(tree.leaves) == 3 * leaves
    assert Counter(tree.nodes[leaf].role for leaf in tree.leaves) == {TRUNK: 3, TWIG: 3 * (leaves - 1)}
    assert Counter(node.step - 1 for node in edges_of(tree, trained=True)) == dict.fromkeys(range(stochastic), 3)


@pytest.mark.parametrize("length", [1, 2, 5, None])
def test_a_twig_walks_to_the_end_in_even_ode_steps(length):
    tree, _ = grown(twigs([SDE] * 10, range(9), length, True))
    assert edges_of(tree, role=TWIG) == edges_of(tree, role=TWIG, kernel=ODE, trained=False)
    began = set()
    for leaf in (leaf for leaf in tree.leaves if tree.nodes[leaf].role == TWIG):
        walked = [i for i in tree.ancestry(leaf) if tree.nodes[i].role == TWIG]
        first = tree.nodes[tree.nodes[walked[-1]].parent]
        steps = [first.step] + [tree.nodes[i].step for i in reversed(walked)]
        gaps = [after - before for before, after in pairwise(steps)]
        assert (first.role, steps[-1]) == (TRUNK, 10)
        assert len(gaps) == min(length or 10, 10 - first.step)
        assert max(gaps) - min(gaps) <= 1
        began.add(first.step)
    assert began == set(range(9))


@pytest.mark.parametrize(
    ("first", "most", "stops"), [(0, 4, (2, 5, 8, 10)), (3, 4, (5, 7, 8, 10)), (8, 4, (9, 10)), (3, None, range(4, 11))]
)
def test_an_end_in_fewer_steps_stops_at_the_nearest_of_even_places(first, most, stops):
    """From 3 on 1.75, 3.5, 5.25 and 7 of the seven steps that are left, a half to the even number."""
    (move,) = brush([SDE] * 10, [2] * 9 + [0], most)(SIDE, first)
    assert move.ode_stops == tuple(stops)
