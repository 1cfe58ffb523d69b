import math
from itertools import pairwise

import pytest
import torch

from samplers import noise
from samplers.kernels import ODE, Kernel, log_prob
from samplers.plans import chain
from samplers.schedule import linear_sigmas
from samplers.trees import TRUNK, TWIG, Move, Root, edge_transition, grow

SDE = Kernel("flow_sde", 0.7)
SIGMAS = linear_sigmas(4, 3.0).tolist()


class Field:
    """A velocity that depends on state, sigma and row, and that counts and remembers its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, state, sigma, rows):
        self.calls.append((sigma, list(rows)))
        bias = torch.tensor([float(row) for row in rows])
        return tuple(torch.tanh(x) * sigma + 0.1 * bias.reshape(-1, *[1] * (x.ndim - 1)) for x in state)

    @property
    def evaluated(self):
        return sum(len(rows) for _, rows in self.calls)


def address_noise(shape, group, path, step, component):
    return noise.noise(shape, "test", group, path, step, component)


def batch(groups=2, size=3, parts=1, shape=(2, 4)):
    roots = [Root(g, i, g, g * parts // groups) for g in range(groups) for i in range(size)]
    start = torch.stack([noise.noise(shape, "start", root.group, root.index) for root in roots])
    return roots, (start,)


def grown(plan, field=None, micro_batch=4, **geometry):
    roots, start = batch(**geometry)
    return grow(plan, SIGMAS, roots, start, field or Field(), address_noise, micro_batch)


def mixed(role, step):
    """A trunk that walks by ODE; at step 1 it also grows two stochastic children, one of them untrained, and a twig."""
    if role == TRUNK and step == 1:
        return (
            Move(),
            Move(SDE, role="side", count=2, trained=True),
            Move(SDE, role="wild"),
            Move(role=TWIG, stops=(3, 4)),
        )
    return (Move(role=role),)


def test_an_ode_chain_is_plain_euler():
    tree = grown(chain([SDE] * 4, (), ()))
    (x,) = batch()[1]
    for sigma, following in pairwise(SIGMAS):
        rows = [0, 0, 0, 1, 1, 1]
        x = x + Field()((x,), sigma, rows)[0] * (following - sigma)
    torch.testing.assert_close(tree.samples[0], x)
    assert [tree.nodes[leaf].root.group for leaf in tree.leaves] == [0, 0, 0, 1, 1, 1]


def test_children_of_one_state_share_its_evaluation():
    field = Field()
    tree = grown(mixed, field, micro_batch=100, groups=1, size=1)
    # The root; then one evaluation with five children; then trunk, 2 side, 1 wild; then these and the twig, at its 0.5.
    assert [(round(sigma, 3), len(rows)) for sigma, rows in field.calls] == [(1.0, 1), (0.9, 1), (0.75, 4), (0.5, 5)]
    assert [len(edges.nodes) for edges in tree.evaluations[1].edges] == [1, 2, 1, 1]
    assert len(tree.leaves) == 5


def test_nodes_at_one_sigma_run_together_whatever_their_role():
    field = Field()
    grown(mixed, field, micro_batch=100, groups=3, size=2)
    assert [sigma for sigma, _ in field.calls] == sorted({sigma for sigma, _ in field.calls}, reverse=True)


def test_siblings_differ_only_by_their_noise():
    tree = grown(mixed, groups=1, size=1)
    evaluation = tree.evaluations[1]
    side = next(edges for edges in evaluation.edges if edges.move.role == "side")
    assert not torch.equal(side.next_state[0][0], side.next_state[0][1])
    velocity = Field()(evaluation.state, evaluation.sigma, evaluation.rows)
    (mean,), std = edge_transition(side, evaluation.sigma, evaluation.state, velocity, tree.sigma_cap)
    for row, node in enumerate(side.nodes.tolist()):
        drawn = address_noise((2, 4), 0, tree.nodes[node].path, 1, 0)
        torch.testing.assert_close(side.next_state[0][row], mean[row] + std * drawn)


def test_only_trained_edges_keep_their_states():
    tree = grown(mixed)
    for evaluation in tree.evaluations:
        assert (evaluation.state is not None) == bool(evaluation.trained)
        for edges in evaluation.edges:
            assert (edges.next_state is not None) == edges.move.trained
            assert (edges.log_prob is not None) == edges.move.kernel.stochastic


def test_a_twig_walks_its_own_sigmas_to_a_sample():
    tree = grown(mixed, groups=1, size=1)
    twigs = [leaf for leaf in tree.leaves if tree.nodes[leaf].role == TWIG]
    assert len(twigs) == 1
    walked = [tree.nodes[i].sigma for i in tree.ancestry(twigs[0])]
    assert walked == [0.0, 0.5, SIGMAS[1]]


def test_a_dead_end_is_not_decoded():
    tree = grown(lambda role, step: (Move(),) if step < 2 else ())
    assert tree.leaves == []
    assert max(node.step for node in tree.nodes) == 2


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_samples_and_log_probs_do_not_depend_on_the_micro_batch(micro_batch):
    whole, cut = grown(mixed, micro_batch=100), grown(mixed, micro_batch=micro_batch)
    key = [(n.root.group, n.root.index, n.path, n.role) for n in (whole.nodes[i] for i in whole.leaves)]
    other = [(n.root.group, n.root.index, n.path, n.role) for n in (cut.nodes[i] for i in cut.leaves)]
    for i, name in enumerate(key):
        torch.testing.assert_close(whole.samples[0][i], cut.samples[0][other.index(name)], rtol=0, atol=1e-5)
    assert log_probs(whole).keys() == log_probs(cut).keys()
    for name, value in log_probs(whole).items():
        assert log_probs(cut)[name] == pytest.approx(value, abs=1e-5)


def log_probs(tree):
    """Of every trained edge, by its address."""
    return {
        (node.root.group, node.root.index, node.path, node.role, node.sigma): value
        for evaluation in tree.evaluations
        for edges in evaluation.trained
        for node, value in zip([tree.nodes[i] for i in edges.nodes], edges.log_prob.tolist(), strict=True)
    }


def test_an_evaluation_never_mixes_parts():
    tree = grown(chain([SDE] * 4, range(3), range(3)), micro_batch=4, groups=4, size=3, parts=2)
    for evaluation in tree.evaluations:
        assert {row * 2 // 4 for row in evaluation.rows} == {evaluation.part}
    assert [len(e.rows) for e in tree.evaluations if e.sigma == 1.0] == [4, 2, 4, 2]


def test_stored_log_probs_are_those_of_the_rounded_next_state():
    roots, start = batch()
    tree = grow(chain([SDE] * 4, range(3), range(3)), SIGMAS, roots, (start[0].bfloat16(),), Field(), address_noise, 4)
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            assert edges.next_state[0].dtype == torch.bfloat16
            velocity = Field()(evaluation.state, evaluation.sigma, evaluation.rows)
            mean, std = edge_transition(edges, evaluation.sigma, evaluation.state, velocity, tree.sigma_cap)
            assert torch.equal(log_prob(edges.next_state, mean, std), edges.log_prob)


def test_a_window_is_stochastic_inside_and_ode_outside():
    tree = grown(chain([SDE] * 4, (1, 2), (1, 2)))
    kernels = {round(e.sigma, 4): {edges.move.kernel for edges in e.edges} for e in tree.evaluations}
    expected = {round(s, 4): {SDE if i in (1, 2) else ODE} for i, s in enumerate(SIGMAS[:-1])}
    assert kernels == expected


def test_states_of_several_tensors_grow_together():
    roots, (video,) = batch()
    audio = torch.stack([noise.noise((5,), "audio", r.group, r.index) for r in roots])
    tree = grow(chain([SDE] * 4, range(3), range(3)), SIGMAS, roots, (video, audio), Field(), address_noise, 4)
    assert [x.shape for x in tree.samples] == [(6, 2, 4), (6, 5)]
    edges = tree.evaluations[0].trained[0]
    noises = [(x - m) for x, m in zip(edges.next_state, _means(tree), strict=True)]
    assert not math.isclose(noises[0].flatten()[0].item(), noises[1].flatten()[0].item())


def _means(tree):
    evaluation = tree.evaluations[0]
    velocity = Field()(evaluation.state, evaluation.sigma, evaluation.rows)
    return edge_transition(evaluation.edges[0], evaluation.sigma, evaluation.state, velocity, tree.sigma_cap)[0]
