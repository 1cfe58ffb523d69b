"""Updates by prefix ratios, against gradients that are summed edge by edge along each path of the tree."""

import math
from dataclasses import replace

import field
import pytest
import torch
from field import credit, lines, nearness, settings, step_in_place, weights_of
from grown import SDE, Field, batch, grown

from flowgrpo.flow.prefix import PathRatios
from samplers.kernels import log_prob
from samplers.plans import branch, chain
from samplers.trees import edge_transition, pruned

PREFIX = {"name": "prefix_ratio", "clip_range": [0.05, 0.1], "dual": 1.5}
PLAIN = {"name": "clip", "clip_range": [0.99, 99.0], "step_weights": "none", "kl": {"beta": 0.0}}
PRESETS = {
    "chain": "flow_grpo",
    "window": "flow_grpo_window",
    "brush": "tempflow",
    "branch": "branch_grpo",
    "twigs": "vgpo",
}


def begun(folder, preset, objective=None, tree=None, **changes):
    """A run in the plane whose prefixes differ from step to step."""
    algorithm = {"preset": preset, "objective": objective or PREFIX, **({"tree": tree} if tree else {})}
    numbers = {"train__groups": 2, "train__group_size": 12, "train__iterations": 2, "eval__every": 10}
    chosen = settings(folder, algorithm=algorithm, **{**numbers, **changes})
    return field.trainer(chosen, reward=nearness, held_out=0)


def moved(run, by=0.05):
    """Move the policy away from what made its rollouts."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in run.weights.parameters:
            p.add_(by * torch.randn_like(p))


def trained(tree, part=None):
    """(evaluation, edges, index) of the edge to each trained node, those of a part or all."""
    return {
        node: (evaluation, edges, index)
        for evaluation in tree.evaluations
        if part is None or evaluation.part == part
        for edges in evaluation.trained
        for index, node in enumerate(edges.nodes.tolist())
    }


def own_log_ratio(run, tree, evaluation, edges, index):
    """The log ratio of one edge, in a call of the model of its own."""
    row = int(edges.rows[index])
    state = tuple(x[row : row + 1] for x in evaluation.state)
    velocity = run.policy.velocity(state, evaluation.sigma, evaluation.rows[row : row + 1])
    alone = replace(edges, rows=torch.tensor([0]))
    mean, std = edge_transition(alone, evaluation.sigma, state, velocity, tree.sigma_cap)
    following = tuple(x[index : index + 1] for x in edges.next_state)
    return (log_prob(following, mean, std, edges.move.kernel.log_prob) - edges.log_prob[index : index + 1])[0]


def by_hand(run, credited, part=0):
    """The loss of an optimizer step: each edge by itself, its path by ancestry."""
    tree, objective = credited.tree, run.config.algorithm.objective
    edges_of = trained(tree, part)
    log_ratios = {node: own_log_ratio(run, tree, *where) for node, where in edges_of.items()}
    loss, total = torch.zeros(()), 0.0
    for node, own in log_ratios.items():
        path = [above for above in tree.ancestry(node) if above in log_ratios]
        assert path[0] == node
        exponent = sum(log_ratios[above].detach() for above in path) + own - own.detach()
        low, high = (bound * len(path) ** objective.power for bound in objective.clip_range)
        advantage = float(credited.of_edges(torch.tensor([node])))
        bounded = exponent.clamp(-low, high)
        value = torch.maximum(-advantage * exponent.exp(), -advantage * bounded.exp())
        if advantage < 0 and exponent > objective.dual * high:
            value = value.detach()
        weight = float(credited.units.to_edges(credited.units.weight)[node])
        loss, total = loss + weight * value, total + weight
    return loss / total


def gradient_of(run, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(run.weights.parameters))])


def gradient(run, credited, part=0):
    step_in_place(run, credited, part)
    return torch.cat([p.grad.flatten() for p in run.weights.parameters])


@pytest.mark.parametrize("micro_batch", [3, 64])
@pytest.mark.parametrize("tree", PRESETS)
def test_gradients_are_those_of_paths_by_hand(tmp_path, tree, micro_batch):
    run = begun(tmp_path, PRESETS[tree], train__micro_batch=micro_batch)
    credited = credit(run, run.rollout(0, run.groups(0)))
    moved(run)
    expected = gradient_of(run, by_hand(run, credited))
    found = gradient(run, credited)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tree", ["chain", "window", "branch", "twigs"])
def test_a_prefix_is_another_ratio_than_the_step_s_own(tmp_path, tree):
    """The gradients above would not show it if paths were of one trained step."""
    wide = {**PREFIX, "clip_range": [9.0, 9.0]}
    found = []
    for objective in (wide, PLAIN):
        run = begun(tmp_path / objective["name"], PRESETS[tree], objective)
        credited = credit(run, run.rollout(0, run.groups(0)))
        moved(run, 0.3)
        found.append(gradient(run, credited))
    assert (found[0] - found[1]).norm() > 0.01 * found[1].norm()


@pytest.mark.parametrize(("preset", "tree"), [("tempflow", None), ("flow_grpo_window", {"size": 1})])
def test_paths_of_one_trained_step_learn_what_plain_ratios_do(tmp_path, preset, tree):
    ends = []
    for objective in ({**PREFIX, "clip_range": [9.0, 9.0], "dual": None}, PLAIN):
        folder = tmp_path / objective["name"]
        run = begun(folder, preset, objective, tree, train__updates=2, train__iterations=4, run__staleness=2)
        run.run()
        ends.append((weights_of(run), lines(run)))
    assert ends[0][1] == ends[1][1]
    assert ends[0][1][-1]["policy/max_abs_log_ratio"] > 1e-3
    for name, tensor in ends[0][0].items():
        assert torch.equal(tensor, ends[1][0][name])


def test_the_second_optimizer_step_has_paths_under_the_weights_of_the_first(tmp_path):
    """At a rollout of the present policy the first step has ratios of 1; those of the second part tell what it moved."""
    run = begun(tmp_path, "flow_grpo", train__updates=2, train__split="samples")
    batch = run.rollout(0, run.groups(0))
    credited = credit(run, batch)
    seen = []
    for part in range(2):
        expected = gradient_of(run, by_hand(run, credited, part))
        before = [p.detach().clone() for p in run.weights.parameters]
        stats = run._update_part(credited, part)
        seen.append(stats.max_abs_log_ratio)
        assert any((p - old).abs().max() > 1e-3 for p, old in zip(run.weights.parameters, before, strict=True))
        norm = min(1.0, run.config.train.max_grad_norm / float(expected.norm()))
        found = torch.cat([p.grad.flatten() for p in run.weights.parameters])
        torch.testing.assert_close(found, norm * expected, rtol=2e-3, atol=1e-5)
    assert seen[0] == 0.0
    assert seen[1] > 1e-3


@pytest.mark.parametrize("tree", PRESETS)
def test_ratios_are_exactly_1_before_the_first_update(tmp_path, tree):
    """So that the loss is -A and nothing is clipped, whatever the bounds."""
    narrow = {**PREFIX, "clip_range": 1e-9}
    run = begun(tmp_path, PRESETS[tree], narrow, train__iterations=1, train__updates=1)
    run.run()
    (told,) = lines(run)
    assert (told["policy/max_abs_log_ratio"], told["policy/clip_fraction"]) == (0.0, 0.0)
    assert told["policy/grad_norm"] > 0


def test_prefixes_cost_no_evaluation(tmp_path):
    counted = []
    for objective in (PREFIX, PLAIN):
        run = begun(tmp_path / objective["name"], "flow_grpo", objective, train__updates=2)
        run.run()
        counted.append([line["cost/model_evaluations"] for line in lines(run)])
    assert counted[0] == counted[1]


def entered(tree, log_ratio):
    """A walk over a tree whose edges have the log ratios (nodes,), and what each edge was told before its own."""
    paths, earlier, position = PathRatios(tree), {}, {}
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            nodes = edges.nodes.tolist()
            earlier |= dict(zip(nodes, paths.earlier(edges).tolist(), strict=True))
            position |= dict(zip(nodes, paths.position(edges).tolist(), strict=True))
            paths.add(edges, log_ratio[edges.nodes].requires_grad_())
    return earlier, position


SHARED = branch([SDE] * 4, (0, 2), 2, stochastic=range(3), trained=range(3), sibling_strength=None, noise_scale=1.0)
PARTLY = chain([SDE] * 4, range(3), (0, 2))


@pytest.mark.parametrize(("plan", "longest"), [(SHARED, 3), (PARTLY, 2)], ids=["branch", "untrained step"])
def test_paths_share_what_they_share_and_pass_over_steps_that_are_not_trained(plan, longest):
    tree = grown(plan, Field(), micro_batch=4)
    log_ratio = torch.randn(len(tree.nodes), generator=torch.Generator().manual_seed(1))
    earlier, position = entered(tree, log_ratio)
    edges_of = trained(tree)
    assert earlier.keys() == edges_of.keys()
    for node in edges_of:
        path = [above for above in tree.ancestry(node) if above in edges_of]
        assert position[node] == len(path)
        assert earlier[node] == pytest.approx(float(log_ratio[path[1:]].double().sum()), abs=1e-9)
    assert max(position.values()) == longest
    assert len(batch()[0]) == sum(count == 1 for count in position.values()) / (2 if plan is SHARED else 1)


def test_a_log_ratio_is_cut_before_it_is_summed():
    tree = grown(chain([SDE] * 4, range(3), range(3)), Field())
    earlier, position = entered(tree, torch.full((len(tree.nodes),), 1e4))
    assert {position[node]: value for node, value in earlier.items()} == {1: 0.0, 2: 20.0, 3: 40.0}


def test_a_step_that_left_the_update_is_not_in_the_paths_below_it():
    """As one whose log-probability is not finite; the steps below it go on from the one above."""
    tree = grown(chain([SDE] * 4, range(3), range(3)), Field())
    left = next(node for node, (_, edges, _) in trained(tree).items() if tree.nodes[node].step == 2)
    keep = torch.ones(len(tree.nodes), dtype=torch.bool)
    keep[left] = False
    earlier, position = entered(pruned(tree, keep, 4), torch.ones(len(tree.nodes)))
    below = next(i for i, node in enumerate(tree.nodes) if node.parent == left)
    assert (earlier[below], position[below]) == (1.0, 2)
    assert math.isclose(sum(earlier.values()), 6 * (0 + 1 + 2) - 2)
