"""Trees of which only some edges are kept for the update."""

import math

import pytest
import torch
from grown import DANCE, SDE, grown, mixed

from samplers import noise
from samplers.pruning import pruned
from samplers.trees import TWIG, Move


def forked(role, step):
    """Every trunk state but the last has two trained children, and a twig to the end."""
    return (Move(SDE, count=2, trained=True), Move(role=TWIG, ode_stops=(4,))) if step < 3 else (Move(),)


def trained_edges(tree):
    """Node -> all that the update knows of the edge to it."""
    return {
        int(node): (
            *(evaluation.sigma, edges.sigma_next, evaluation.part, edges.move, evaluation.rows[row]),
            *(evaluation.state[0][row].tolist(), edges.next_state[0][e].tolist(), edges.mean[0][e].tolist()),
            float(edges.log_prob[e]),
        )
        for evaluation in tree.evaluations
        for edges in evaluation.trained
        for e, (row, node) in enumerate(zip(edges.rows.tolist(), edges.nodes, strict=True))
    }


@pytest.mark.parametrize(("share", "micro_batch"), [(0.5, 4), (0.2, 3), (0.9, 100), (0.5, 1)])
def test_a_pruned_tree_has_exactly_the_kept_edges_in_full_evaluations(share, micro_batch):
    tree = grown(forked, groups=4, size=1, parts=2, keep_means=True)
    keep = torch.from_numpy(noise.generator("keep", micro_batch).random(len(tree.nodes)) < share)
    whole, left = trained_edges(tree), pruned(tree, keep, micro_batch)
    assert len(whole) == 4 * (2 + 4 + 8)
    kept = {node: edge for node, edge in whole.items() if keep[node]}
    assert 0 < len(kept) < len(whole)
    assert trained_edges(left) == kept
    # Each state with a kept edge has one row, beside as many others of its part and sigma as fit.
    states = {(edge[2], edge[0], tree.nodes[node].parent) for node, edge in kept.items()}
    places = [(part, sigma) for part, sigma, _ in states]
    full = {place: math.ceil(places.count(place) / micro_batch) for place in set(places)}
    evaluated = [(e.part, e.sigma) for e in left.evaluations]
    assert {place: evaluated.count(place) for place in set(evaluated)} == full
    assert sum(len(e.rows) for e in left.evaluations) == len(states)
    assert all(1 <= len(e.rows) <= micro_batch for e in left.evaluations)
    assert all(edges.move.trained for e in left.evaluations for edges in e.edges)
    assert (left.nodes, left.leaves) == (tree.nodes, tree.leaves)


def test_pruning_nothing_leaves_every_trained_edge_and_pruning_all_leaves_none():
    tree = grown(mixed, keep_means=True)
    everything = torch.ones(len(tree.nodes), dtype=torch.bool)
    assert trained_edges(pruned(tree, everything, 4)) == trained_edges(tree)
    assert pruned(tree, ~everything, 4).evaluations == []


def test_pruned_edges_without_means_have_none():
    tree = grown(forked)
    left = pruned(tree, torch.ones(len(tree.nodes), dtype=torch.bool), 4)
    assert {edges.mean for e in left.evaluations for edges in e.edges} == {None}


def test_of_two_trained_moves_of_one_state_either_can_be_pruned():
    tree = grown(lambda role, step: (Move(SDE, trained=True), Move(DANCE, trained=True)) if step == 0 else ())
    keep = torch.tensor([node.path[-1] == 0 for node in tree.nodes])  # the first of each two siblings, and the roots
    left = pruned(tree, keep, 4)
    assert {edges.move.kernel for e in left.evaluations for edges in e.edges} == {SDE}
