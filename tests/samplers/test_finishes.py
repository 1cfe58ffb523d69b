"""Trees whose last ODE steps are walked apart: the same trees, in other calls."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from grown import SDE, SIGMAS, Field, address_noise, batch, grown, mixed

from samplers.growth import grow_and_finish
from samplers.plans import brush, chain, twigs
from samplers.trees import Move

PLANS = {
    "brush": brush([SDE] * 4, [3, 0, 2, 0]),
    "brush of coarse finishes": brush([SDE] * 4, [3, 3, 3, 0], finish=2),
    "twigs": twigs([SDE] * 4, range(3), None, True),
    "short twigs": twigs([SDE] * 4, range(3), 2, False),
    "a twig beside others": mixed,
}


class Finish:
    """Euler steps by a velocity, which remembers its calls."""

    def __init__(self, field):
        self.field, self.calls = field, []

    def __call__(self, state, sigmas, rows):
        self.calls.append((tuple(sigmas), list(rows)))
        for sigma, following in pairwise(sigmas):
            velocity = self.field(state, sigma, rows)
            state = tuple(x + v * (following - sigma) for x, v in zip(state, velocity, strict=True))
        return state


def finished(plan, micro_batch=4, finish=None, field=None, **geometry):
    roots, start = batch(**geometry)
    field = field or Field()
    finish = finish or Finish(field)
    tree = grow_and_finish(
        plan,
        SIGMAS,
        roots,
        start=start,
        evaluate=field,
        noise=address_noise,
        micro_batch=micro_batch,
        finish=finish,
    )
    return tree, finish


def leaves(tree):
    """Samples by the root, the path and the role of their leaves."""
    nodes = [tree.nodes[leaf] for leaf in tree.leaves]
    return dict(zip([(n.root.group, n.path, n.role) for n in nodes], tree.samples[0], strict=True))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_tree_is_that_of_steps_one_by_one_and_what_is_trained_is_the_same_to_the_bit(plan, parts):
    plain_field, field = Field(), Field()
    plain = grown(plan, plain_field, parts=parts)
    tree, finish = finished(plan, field=field, parts=parts)
    assert finish.calls
    assert leaves(tree).keys() == leaves(plain).keys()
    for key, sample in leaves(plain).items():
        torch.testing.assert_close(leaves(tree)[key], sample)
    assert field.evaluated == plain_field.evaluated
    counts, plain_counts = (Counter((e.sigma, e.part) for e in t.evaluations for _ in e.rows) for t in (tree, plain))
    assert counts == plain_counts
    assert len(tree.nodes) == len(plain.nodes)
    other, _ = finished(plan, finish=lambda state, sigmas, rows: tuple(x * 0 for x in state), parts=parts)
    trained, alike = ([e for e in t.evaluations if e.trained] for t in (plain, other))
    assert len(trained) == len(alike) > 0
    for a, b in zip(trained, alike, strict=True):
        assert (a.sigma, a.rows, a.part) == (b.sigma, b.rows, b.part)
        for edges, like in zip(a.trained, b.trained, strict=True):
            assert torch.equal(edges.log_prob, like.log_prob)
            assert all(torch.equal(x, y) for x, y in zip(edges.next_state, like.next_state, strict=True))


def test_a_call_has_the_same_rows_from_its_first_step_to_the_end():
    _, finish = finished(brush([SDE] * 4, [3, 0, 2, 0]), micro_batch=5, groups=2, size=2)
    # Of 4 roots: 12 children at step 1, which three steps are left to, and 8 at step 3, which one is left to.
    expected = [(tuple(SIGMAS[step:]), n) for step, sizes in ((1, (5, 5, 2)), (3, (5, 3))) for n in sizes]
    assert [(sigmas, len(rows)) for sigmas, rows in finish.calls] == expected


def test_ancestry_and_what_is_left_of_a_move_are_those_of_the_steps():
    tree, _ = finished(brush([SDE] * 4, [2, 0, 0, 0]), groups=1, size=1)
    leaf = tree.leaves[0]
    walked = [(tree.nodes[i].step, tree.nodes[i].remaining_stops) for i in tree.ancestry(leaf)]
    assert walked == [(4, ()), (3, (4,)), (2, (3, 4)), (1, ())]


def test_a_plan_without_finishes_walks_as_ever():
    """Chains ask their plan at every step, and a move that ends before the schedule does asks it again."""
    for plan in (chain([SDE] * 4, range(2), range(2)), lambda role, step: (Move(ode_stops=(step + 1,)),)):
        tree, finish = finished(plan, micro_batch=100)
        assert [len(sigmas) for sigmas, _ in finish.calls] in ([], [2])
        torch.testing.assert_close(tree.samples[0], grown(plan, micro_batch=100).samples[0])
