"""How trees grow, the noise of siblings, and trees of which only some edges are kept for the update."""

import math
from itertools import pairwise

import pytest
import torch
from grown import DANCE, SDE, SIGMAS, Field, address_noise, batch, grown, mixed
from hypothesis import given, settings
from hypothesis import strategies as st

from samplers import noise
from samplers.growth import grow, trained_steps
from samplers.kernels import ODE, log_prob
from samplers.plans import chain, twigs
from samplers.pruning import prune
from samplers.trees import TRUNK, TWIG, Move, edge_transition


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
    (mean,), std = means(tree, side)
    for row, node in enumerate(side.nodes.tolist()):
        drawn = address_noise((2, 4), 0, tree.nodes[node].path, 1, 0)
        torch.testing.assert_close(side.next_state[0][row], mean[row] + std * drawn)


def test_nodes_that_a_gate_leaves_out_have_no_children_and_no_sample():
    roots, start = batch(groups=1, size=4)
    seen, field = [], Field()

    def gate(tree, nodes):
        seen.append([tree.nodes[node].step for node in nodes])
        return nodes[1:3] if tree.nodes[nodes[0]].step == 2 else nodes

    options = {"noise": address_noise, "micro_batch": 4, "gate": gate}
    tree = grow(chain([SDE] * 4, range(3), range(3)), SIGMAS, roots, start, field, **options)
    whole = grow(chain([SDE] * 4, range(3), range(3)), SIGMAS, roots, start, Field(), address_noise, 4)
    assert seen == [[0] * 4, [1] * 4, [2] * 4, [3] * 2]
    assert field.evaluated == 4 + 4 + 2 + 2
    assert [tree.nodes[leaf].root.index for leaf in tree.leaves] == [1, 2]
    torch.testing.assert_close(tree.samples[0], whole.samples[0][1:3])


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


def log_probs(tree):
    """Of every trained edge, by its address."""
    found = {}
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            for i, value in zip(edges.nodes.tolist(), edges.log_prob.tolist(), strict=True):
                node = tree.nodes[i]
                found[node.root.group, node.root.index, node.path, node.role, node.sigma] = value
    return found


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
            assert torch.equal(log_prob(edges.next_state, *means(tree, edges)), edges.log_prob)


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
    (edges,) = tree.evaluations[0].trained
    noises = [(x - m).flatten()[0].item() for x, m in zip(edges.next_state, means(tree, edges)[0], strict=True)]
    assert not math.isclose(*noises)


def means(tree, edges):
    """Means and std of edges, by another call of the velocity."""
    (evaluation,) = (e for e in tree.evaluations if any(own is edges for own in e.edges))
    velocity = Field()(evaluation.state, evaluation.sigma, evaluation.rows)
    return edge_transition(edges, evaluation.sigma, evaluation.state, velocity, tree.sigma_cap)


def test_states_with_trained_edges_share_no_evaluation_with_others():
    tree = grown(twigs([SDE] * 4, range(3), None, True), micro_batch=100)
    # At each sigma the 6 states of the chains, and the twigs of earlier steps; the last step is ODE and trains nothing.
    counts = [(round(e.sigma, 3), len(e.rows), bool(e.trained)) for e in tree.evaluations]
    assert counts == [
        (1.0, 6, True),
        *[(0.9, 6, False), (0.9, 6, True)],
        *[(0.75, 12, False), (0.75, 6, True)],
        (0.5, 24, False),
    ]
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            assert sorted(edges.rows.tolist()) == list(range(6))
            assert evaluation.state[0].shape == edges.next_state[0].shape == (6, 2, 4)


def test_kept_means_are_those_of_the_step():
    tree = grown(mixed, keep_means=True)
    assert any(evaluation.trained for evaluation in tree.evaluations)
    for evaluation in tree.evaluations:
        for edges in evaluation.edges:
            assert (edges.mean is not None) == edges.move.trained
            if edges.move.trained:
                assert torch.equal(edges.mean[0], means(tree, edges)[0][0])
    assert all(edges.mean is None for e in grown(mixed).evaluations for edges in e.edges)


@st.composite
def plans(draw):
    """(role, step) -> moves, drawn for each place: step, split, twig, own stops, several of them, dead end."""

    def place(step):
        stops = tuple(sorted({*draw(st.sets(st.integers(step + 1, 4), max_size=2)), 4}))
        role = draw(st.sampled_from([TRUNK, "side"]))
        sde, ode = Move(SDE, role, trained=draw(st.booleans())), Move(role=role)
        count, strength = draw(st.integers(2, 3)), draw(st.sampled_from([None, 4.0]))
        split = Move(DANCE, role, count, trained=True, sibling_strength=strength)
        twig, straight = Move(role=TWIG, ode_stops=stops), Move(role=role, ode_stops=stops)
        several = [(sde, twig), (Move(), twig, split), (split, straight)]
        return draw(st.sampled_from([(ode,), (sde,), (split,), (straight,), (), *several]))

    moves = {(role, step): place(step) for role in (TRUNK, "side") for step in range(4)}
    return lambda role, step: moves[role, step]


def enumerated(plan, role=TRUNK, step=0, remaining=()):
    """(evaluations, leaves) below one node, by asking the plan alone."""
    if step == 4:
        return 0, 1
    moves = (Move(role=role, ode_stops=remaining),) if remaining else plan(role, step)
    below = [
        enumerated(plan, move.role, *((move.ode_stops[0], move.ode_stops[1:]) if move.ode_stops else (step + 1, ())))
        for move in moves
        for _ in range(move.count)
    ]
    return bool(moves) + sum(rows for rows, _ in below), sum(leaves for _, leaves in below)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(plan=plans(), micro_batch=st.integers(1, 9))
def test_any_plan_grows_as_it_says_and_alike_whatever_the_micro_batch(plan, micro_batch):
    field = Field()
    tree = grown(plan, field, micro_batch)
    rows, leaves = enumerated(plan)
    assert field.evaluated == sum(len(e.rows) for e in tree.evaluations) == 6 * rows
    assert max((len(e.rows) for e in tree.evaluations), default=0) <= micro_batch
    assert len(tree.leaves) == 6 * leaves
    assert {tree.nodes[leaf].sigma for leaf in tree.leaves} <= {0.0}
    for i, node in enumerate(tree.nodes):
        assert node.parent is None or (node.parent < i and tree.nodes[node.parent].sigma > node.sigma)
    foretold = trained_steps(plan, SIGMAS)
    assert len(foretold) == len(tree.trained_steps)
    assert set(foretold) == set(tree.trained_steps)
    whole = grown(plan, micro_batch=1000)
    ends, cut = samples(whole), samples(tree)
    assert ends.keys() == cut.keys()
    for name, sample in ends.items():
        torch.testing.assert_close(cut[name], sample, rtol=1e-6, atol=1e-6)
    assert log_probs(tree) == pytest.approx(log_probs(whole), abs=1e-5)


def samples(tree):
    """Of every leaf, by its address."""
    leaves = [tree.nodes[leaf] for leaf in tree.leaves]
    named = {(n.root.group, n.root.index, n.path, n.role): tree.samples[0][i] for i, n in enumerate(leaves)}
    assert len(named) == len(leaves)
    return named


def test_a_lone_child_has_its_parent_s_address_and_siblings_have_their_numbers():
    """So that noise along a chain is told apart by its step alone."""
    assert {node.path for node in grown(chain([SDE] * 4, range(4), ())).nodes} == {(0,), (1,), (2,)}
    split = grown(lambda role, step: (Move(SDE, count=2 if step == 1 else 1),), groups=1, size=1)
    paths = [[node.path for node in split.nodes if node.step == step] for step in (1, 2, 3)]
    assert paths == [[(0,)], [(0, 0), (0, 1)], [(0, 0), (0, 1)]]


@pytest.mark.parametrize("kept", [(), {(0, SIGMAS[1])}])
def test_a_velocity_that_is_kept_has_its_graph_although_nothing_else_has(kept):
    weight, roots, start = torch.ones((), requires_grad=True), *batch()

    def evaluate(state, sigma, rows):
        return tuple(weight * x for x in state)

    with torch.no_grad():
        plan = chain([SDE] * 4, range(3), (1,))
        tree = grow(plan, SIGMAS, roots, start, evaluate, address_noise, 100, keep_graphs=kept)
    velocities = [evaluation.velocity for evaluation in tree.evaluations if evaluation.trained]
    assert [of is not None and of[0].requires_grad for of in velocities] == [bool(kept)]
    assert not any(evaluation.velocity for evaluation in tree.evaluations if not evaluation.trained)
    assert not tree.samples[0].requires_grad


def split_step_split(**siblings):
    """Two children of each root, with these options of their noise; one plain child of each; of each of those two again."""
    split, step = Move(DANCE, count=2, trained=True, **siblings), Move(DANCE, trained=True)
    return lambda role, at: {0: (split,), 1: (step,), 2: (split,)}.get(at, ())


def dance_noises(tree, step):
    """Of every edge of a step: what was added to the mean in units of the kernel's std, the log-prob, and the parent."""
    std = 0.3 * math.sqrt(SIGMAS[step] - SIGMAS[step + 1])
    edges = [edges for e in tree.evaluations if e.sigma == SIGMAS[step] for edges in e.trained]
    parents = torch.tensor([tree.nodes[node].parent for e in edges for node in e.nodes])
    noises = torch.cat([(e.next_state[0] - e.mean[0]) / std for e in edges])
    return noises, torch.cat([e.log_prob for e in edges]), parents


@pytest.mark.parametrize("strength", [None, 1.0, 4.0])
def test_siblings_share_noise_of_their_parent_and_of_nothing_else(strength):
    size = 50_000
    tree = grown(split_step_split(sibling_strength=strength), groups=2, size=2, shape=(size,), keep_means=True)
    noises, _, parents = zip(*(dance_noises(tree, step) for step in range(3)), strict=True)
    drawn, parent = torch.cat(noises), torch.cat(parents)  # (4 roots: 8 edges, 8 and 16; size), (32,)
    covariance = 0 if strength is None else 1 / (1 + strength**2)
    expected = torch.where(parent == parent[:, None], covariance, 0.0).fill_diagonal_(1)
    assert (parent == parent[:, None]).sum() == 32 + 8 + 16
    assert drawn.mean(1).abs().max() < 5 / math.sqrt(size)
    assert (drawn @ drawn.T / size - expected).abs().max() < 5 * math.sqrt(2 / size)


def test_siblings_share_noise_tensor_by_tensor():
    roots, (video,) = batch(groups=1, size=1, shape=(100_000,))
    plan, start = split_step_split(sibling_strength=1.0), (video, video)
    tree = grow(plan, SIGMAS, roots, start, Field(), address_noise, 4, keep_means=True)
    (edges,) = tree.evaluations[0].trained
    std = 0.3 * math.sqrt(SIGMAS[0] - SIGMAS[1])
    first, second = ((x - mean) / std for x, mean in zip(edges.next_state, edges.mean, strict=True))
    torch.testing.assert_close(first @ second.T / 100_000, torch.zeros(2, 2), rtol=0, atol=0.016)
    torch.testing.assert_close(second @ second.T / 100_000, (1 + torch.eye(2)) / 2, rtol=0, atol=0.023)


@pytest.mark.parametrize("strength", [None, 4.0])
def test_the_noise_scale_multiplies_the_noise_and_the_log_prob_knows_nothing_of_it(strength):
    plain, hot = (
        grown(split_step_split(sibling_strength=strength, noise_scale=scale), shape=(50,), keep_means=True)
        for scale in (1.0, 4.0)
    )
    cold_noise, _, _ = dance_noises(plain, 0)
    hot_noise, recorded, _ = dance_noises(hot, 0)
    torch.testing.assert_close(hot_noise, 4 * cold_noise, rtol=1e-4, atol=1e-4)
    std = 0.3 * math.sqrt(SIGMAS[0] - SIGMAS[1])
    expected = torch.distributions.Normal(0, std).log_prob(4 * cold_noise * std).mean(1)
    torch.testing.assert_close(recorded, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dance_noises(hot, 1)[0], dance_noises(plain, 1)[0], rtol=1e-4, atol=1e-4)


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
    whole, left = trained_edges(tree), prune(tree, keep, micro_batch)
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
    assert trained_edges(prune(tree, everything, 4)) == trained_edges(tree)
    assert prune(tree, ~everything, 4).evaluations == []


def test_of_two_trained_moves_of_one_state_either_can_be_pruned_and_without_means_there_are_none():
    tree = grown(lambda role, step: (Move(SDE, trained=True), Move(DANCE, trained=True)) if step == 0 else ())
    keep = torch.tensor([node.path[-1] == 0 for node in tree.nodes])  # the first of each two siblings, and the roots
    left = prune(tree, keep, 4)
    assert {(edges.move.kernel, edges.mean) for e in left.evaluations for edges in e.edges} == {(SDE, None)}
