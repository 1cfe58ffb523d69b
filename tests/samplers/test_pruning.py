"""Trees that replace those of the same roots, and trees that begin below noise."""

from dataclasses import replace

import pytest
import torch
from grown import SDE, SIGMAS, Field, address_noise, batch, grown, mixed

from samplers import plans
from samplers.growth import grow
from samplers.pruning import replace_roots
from samplers.trees import Root

CHAIN = plans.chain([SDE] * 4, range(3), range(3))


def below(step, plan=CHAIN, roots=((0, 2), (1, 1)), keep_means=False):
    """Trees of some roots that begin at a step of the schedule."""
    made = [Root(group, index, group, 0, step) for group, index in roots]
    start = torch.stack([torch.full((2, 4), 0.1 * (1 + index)) for _, index in roots])
    return grow(plan, SIGMAS, made, (start,), Field(), address_noise, 4, keep_means)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_root_has_only_the_steps_below_its_own(step):
    tree = below(step)
    assert sorted({evaluation.sigma for evaluation in tree.evaluations}, reverse=True) == SIGMAS[step:-1]
    assert [node.step for node in tree.nodes if node.parent is None] == [step, step]
    assert [(node.root.group, node.root.index) for node in (tree.nodes[leaf] for leaf in tree.leaves)] == [
        (0, 2),
        (1, 1),
    ]
    assert sorted({sigma for _, sigma, _ in tree.trained_steps}, reverse=True) == SIGMAS[step:3]


def test_a_chain_below_noise_is_the_rest_of_a_chain_from_noise():
    roots, start = batch(groups=1)
    whole = grow(CHAIN, SIGMAS, roots, start, Field(), address_noise, 4)
    middle = next(evaluation for evaluation in whole.evaluations if evaluation.sigma == SIGMAS[2])
    lower = [replace(root, step=2) for root in roots]
    rest = grow(CHAIN, SIGMAS, lower, middle.state, Field(), address_noise, 4)
    assert torch.equal(rest.samples[0], whole.samples[0])


@pytest.mark.parametrize(("plan", "keep_means"), [(CHAIN, True), (mixed, False)])
def test_replaced_trees_leave_and_the_others_stay_as_they_were(plan, keep_means):
    plain, other = grown(plan, keep_means=keep_means), below(1, plan, keep_means=keep_means)
    tree = replace_roots(plain, other)
    gone = {(0, 2), (1, 1)}

    def edges_of(tree, kept):
        """Each edge with all that is known of it, by root, step and path."""
        found = {}
        for evaluation in tree.evaluations:
            for edges in evaluation.edges:
                for place, (row, node) in enumerate(zip(edges.rows.tolist(), edges.nodes.tolist(), strict=True)):
                    own = tree.nodes[node]
                    if kept(own.root):
                        told = [evaluation.rows[row], edges.move, edges.sigma_next, tree.nodes[own.parent].sigma]
                        tensors = [edges.log_prob] + [s[0] for s in (edges.next_state, edges.mean) if s is not None]
                        told += [None if each is None else each[place].tolist() for each in tensors]
                        told += [] if evaluation.state is None else [evaluation.state[0][row].tolist()]
                        found[own.root.group, own.path, own.step, own.role] = told
        return found

    def stays(root):
        return (root.group, root.index) not in gone

    assert edges_of(tree, stays) == edges_of(plain, stays)
    assert edges_of(tree, lambda root: not stays(root)) == edges_of(other, lambda root: True)
    assert tree.nodes[: len(plain.nodes)] == plain.nodes
    sigmas = [evaluation.sigma for evaluation in tree.evaluations]
    assert sigmas == sorted(sigmas, reverse=True)
    leaves = dict(zip(plain.leaves, plain.samples[0], strict=True))
    for leaf, sample in zip(tree.leaves, tree.samples[0], strict=True):
        if leaf < len(plain.nodes):
            assert stays(tree.nodes[leaf].root)
            assert torch.equal(sample, leaves[leaf])
    assert torch.equal(tree.samples[0][-len(other.leaves) :], other.samples[0])
    assert len(tree.leaves) == sum(stays(plain.nodes[leaf].root) for leaf in plain.leaves) + len(other.leaves)


def test_an_evaluation_without_replaced_roots_is_kept_whole():
    plain = grown(CHAIN, micro_batch=3)  # each group has evaluations of its own
    tree = replace_roots(plain, below(1, roots=((1, 1),)))
    whole = [evaluation for evaluation in plain.evaluations if evaluation.rows == [0, 0, 0]]
    assert len(whole) == 4
    assert all(any(each is evaluation for each in tree.evaluations) for evaluation in whole)
