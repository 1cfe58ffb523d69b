"""Batches that go straight on: the same tree as by single steps, in as few open calls as there are batches."""

from itertools import pairwise

import pytest
import torch
from grown import DANCE, SDE, SIGMAS, Field, address_noise, batch, mixed

from samplers.growth import grow
from samplers.kernels import DPM2
from samplers.plans import branch, chain
from samplers.trees import Move

STEPS = len(SIGMAS) - 1
PLANS = {
    "a chain": chain([SDE] * STEPS, range(STEPS - 1), range(STEPS - 1)),
    "a window": chain([SDE] * STEPS, {1}, {1}),
    "a chain of second order": lambda role, step: (Move(DPM2 if step else DANCE, role, trained=step == 0),),
    "a branch": branch(
        [SDE] * STEPS, {1}, 2, stochastic={1, 2}, trained={1, 2}, sibling_strength=None, noise_scale=1.0
    ),
    "a tree of several roles": mixed,
}


class Travelling(Field):
    """A field that also takes several steps, and records which."""

    def __init__(self):
        super().__init__()
        self.travels = []

    def travel(self, state, steps, rows, onward):
        self.travels.append((steps, list(rows)))
        for step in steps:
            state = onward(self(state, SIGMAS[step], rows))


def both(plan, **options):
    """Grow a tree by single steps and by open calls."""
    roots, start = batch(groups=2, size=3, parts=2)
    field = Travelling()
    given = {"noise": address_noise, "micro_batch": 2, "keep_means": True, **options}
    apart = grow(plan, SIGMAS, roots, start, evaluate=Field(), **given)
    return apart, grow(plan, SIGMAS, roots, start, evaluate=field, travel=field.travel, **given), field


def edges_by_path(tree):
    return {
        (tree.nodes[node].root, tree.nodes[node].path, evaluation.sigma, edges.move): (
            tuple(x[row] for x in edges.next_state or ()),
            None if edges.log_prob is None else edges.log_prob[row],
            tuple(x[row] for x in edges.mean or ()),
        )
        for evaluation in tree.evaluations
        for edges in evaluation.edges
        for row, node in enumerate(edges.nodes.tolist())
    }


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_tree_is_the_same_to_the_bit(plan):
    apart, together, _ = both(plan)
    assert torch.equal(together.samples[0], apart.samples[0])
    assert [(e.sigma, e.part, e.rows) for e in together.evaluations] == [
        (e.sigma, e.part, e.rows) for e in apart.evaluations
    ]
    assert edges_by_path(together).keys() == edges_by_path(apart).keys()
    for key, found in edges_by_path(together).items():
        torch.testing.assert_close(found, edges_by_path(apart)[key], rtol=0, atol=0)
    assert all(a.sigma >= b.sigma for a, b in pairwise(together.evaluations))


def test_each_batch_of_a_chain_takes_all_steps_in_one_call():
    _, _, field = both(PLANS["a chain"])
    assert [steps for steps, _ in field.travels] == [range(STEPS)] * 4  # two parts of three rows, in twos
    assert field.evaluated == 6 * STEPS


def test_a_call_ends_where_a_batch_splits():
    _, _, field = both(PLANS["a branch"])
    assert {steps for steps, _ in field.travels} == {range(2, STEPS)}
    _, _, field = both(PLANS["a tree of several roles"])
    assert not field.travels


def test_kept_graphs_divide_trained_steps_from_others():
    apart, together, field = both(PLANS["a window"], keep_graphs={(1, SIGMAS[1])})
    assert [steps for steps, _ in field.travels] == [range(2, STEPS)] * 4
    kept = [e.part for e in together.evaluations if e.velocity is not None]
    assert kept == [e.part for e in apart.evaluations if e.velocity is not None] == [1, 1]


def test_graphs_are_kept_of_the_steps_that_are_asked_for_alone():
    asked = {(0, SIGMAS[0]), (0, SIGMAS[1])}
    apart, together, field = both(PLANS["a chain"], keep_graphs=asked)
    assert {steps for steps, _ in field.travels} == {range(2), range(2, STEPS)}
    for tree in (apart, together):
        kept = [(e.part, e.sigma) for e in tree.evaluations if e.velocity is not None]
        assert sorted(kept) == sorted(2 * [*asked])  # three rows of a part, in twos


def test_a_gate_keeps_batches_from_going_on():
    _, _, field = both(PLANS["a chain"], gate=lambda tree, nodes: nodes)
    assert not field.travels
