"""Chains that somebody else walked are the tree that growth would have returned."""

import field
import pytest
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo_engine.flow.trajectory import chains_of
from samplers import noise
from samplers.growth import grow
from samplers.kernels import Kernel
from samplers.plans import chain
from samplers.schedule import linear_sigmas
from samplers.trees import Root

KERNEL = Kernel("flow_sde", 0.7)
ROOTS = [
    Root(group, index, Row("a" * (group + 1), 10 * group + index), part)
    for group, part in ((0, 1), (1, 0), (2, 1))
    for index in range(3)
]


def visited(tree, index_of):
    """The state (R, ...) before each step of trained chains, and at the end, by root."""
    states = {}
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            for row, node, following in zip(
                edges.rows.tolist(), edges.nodes.tolist(), edges.next_state[0], strict=True
            ):
                step, i = tree.nodes[node].step, index_of[tree.nodes[node].root]
                states.setdefault(step - 1, {})[i] = evaluation.state[0][row]
                states.setdefault(step, {})[i] = following
    return {step: torch.stack([own[i] for i in range(len(own))]) for step, own in states.items()}


@pytest.mark.parametrize("micro_batch", [2, 9])
@pytest.mark.parametrize("trained", [range(2, 4), range(5), (1, 3)])
def test_scored_again_they_are_the_tree_that_was_grown_to_the_bit(micro_batch, trained):
    policy = FieldPolicy(field.Network(), (2,), linear_sigmas(6, 3.0))
    plan = chain([KERNEL] * 6, range(5), trained)
    with torch.no_grad():
        grown = grow(
            plan,
            policy.sigmas,
            ROOTS,
            policy.start([root.row for root in ROOTS]),
            policy.velocity,
            lambda shape, *address: noise.noise(shape, "test", *address),
            micro_batch,
            True,
        )
    chains = chains_of(
        plan,
        policy.sigmas,
        ROOTS,
        visited(grown, {root: i for i, root in enumerate(ROOTS)}),
        velocity=policy.velocity,
        dtype=torch.float32,
        micro_batch=micro_batch,
        keep_means=True,
    )
    own = chains.tree
    assert own.nodes == grown.nodes
    assert own.leaves == grown.leaves
    assert [ROOTS[i] for i in chains.leaves] == [grown.nodes[leaf].root for leaf in grown.leaves]
    assert [ROOTS[i] for i in chains.root_of] == [node.root for node in grown.nodes]
    assert own.trained_steps == grown.trained_steps
    for ours, theirs in zip(own.evaluations, grown.evaluations, strict=True):
        assert (ours.sigma, ours.rows, ours.part) == (theirs.sigma, theirs.rows, theirs.part)
        ((left,), (right,)) = ours.edges, theirs.edges
        assert (left.move, left.sigma_next) == (right.move, right.sigma_next)
        assert left.nodes.tolist() == right.nodes.tolist()
        assert left.rows.tolist() == right.rows.tolist()
        if not left.move.trained:
            assert ours.state is left.next_state is left.log_prob is None
            continue
        assert torch.equal(ours.state[0], theirs.state[0])
        assert torch.equal(left.next_state[0], right.next_state[0])
        assert torch.equal(left.log_prob, right.log_prob)
        assert torch.equal(left.mean[0], right.mean[0])


def test_steps_that_are_not_trained_are_not_evaluated_and_a_next_state_is_scored_as_it_was_sent():
    policy = FieldPolicy(field.Network(), (2,), linear_sigmas(4, 3.0))
    seen = []

    def velocity(state, sigma, rows):
        seen.append((sigma, state[0].dtype))
        return policy.velocity((state[0].float(),), sigma, rows)

    states = {step: torch.randn(9, 2) for step in (1, 2)}
    plan = chain([KERNEL] * 4, [1], [1])
    options = {"velocity": velocity, "dtype": torch.bfloat16, "micro_batch": 9}
    chains = chains_of(plan, policy.sigmas, ROOTS, states, **options)
    assert seen == [(policy.sigmas[1], torch.bfloat16)] * 2  # of the two parts
    (edges,) = chains.tree.evaluations[2].edges
    assert edges.next_state[0].dtype == torch.float32
    assert torch.equal(edges.next_state[0], states[2][3:6])
