"""Updates by ratios of prefixes and trajectories, against gradients summed edge by edge along each path of the tree."""

import math
from dataclasses import replace
from itertools import pairwise

import field
import numpy as np
import pytest
import torch
from field import credit, lines, nearness, settings, step_in_place, weights_of
from grown import SDE, Field, batch, grown

from flowgrpo.flow.methods.objectives.path_objectives import PrefixRatio, TrajectoryRatio
from flowgrpo.flow.methods.objectives.policy_gradient import Clip
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.updates.path_ratios import PathRatios
from flowgrpo.flow.updates.update import Credited, update_part
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.weights.trained_weights import Weights
from samplers.growth import grow
from samplers.kernels import Kernel, log_prob, transition
from samplers.plans import branch, chain
from samplers.pruning import prune
from samplers.trees import Root, edge_transition

PREFIX = {"name": "prefix_ratio", "clip_range": [0.05, 0.1], "dual": 1.5}
PLAIN = {"name": "clip", "clip_range": [0.99, 99.0], "step_weights": "none", "kl": {"beta": 0.0}}
WHOLE = {"name": "trajectory_ratio", "clip_range": [0.005, 0.01]}
TREES = {"window": "flow_grpo_window", "brush": "tempflow", "branch": "branch_grpo", "twigs": "vgpo"}
PRESETS = {"chain": "flow_grpo", **TREES}


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


def gradient(run, credited):
    step_in_place(run, credited)
    return torch.cat([p.grad.flatten() for p in run.weights.parameters])


@pytest.mark.parametrize("micro_batch", [3, 64])
@pytest.mark.parametrize("tree", PRESETS)
def test_gradients_are_those_of_paths_by_hand(tmp_path, tree, micro_batch):
    run = begun(tmp_path, PRESETS[tree], train__micro_batch=micro_batch)
    credited = credit(run, run.rollout(0, run.groups(0)))
    moved(run)
    expected = gradient_of(run, by_hand(run, credited))
    assert expected.norm() > 1e-3
    before = run.policy.evaluations
    torch.testing.assert_close(gradient(run, credited), expected, rtol=1e-3, atol=1e-5)
    replayed = sum(len(e.rows) for e in credited.tree.evaluations if e.trained and e.part == 0)
    assert run.policy.evaluations - before == replayed  # paths cost none


def trajectories(tree, log_ratios):
    """The trained edges of each trajectory, by its last one."""
    paths = {node: [above for above in tree.ancestry(node) if above in log_ratios] for node in log_ratios}
    inner = {above for path in paths.values() for above in path[1:]}
    return {node: path for node, path in paths.items() if node not in inner}


def clipped_loss(ratio, advantage, low=0.005, high=0.01):
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def of_trajectories(run, credited, *, normalised):
    """GSPO's loss of chains: each trajectory has one ratio, through which the gradient of all its steps flows."""
    log_ratios = {node: own_log_ratio(run, credited.tree, *where) for node, where in trained(credited.tree, 0).items()}
    losses, stopped = [], []
    for node, path in trajectories(credited.tree, log_ratios).items():
        exponent = torch.stack([log_ratios[each] for each in path])
        (advantage,) = credited.of_edges(torch.tensor(path)).unique().tolist()
        ratio = (exponent.mean() if normalised else exponent.sum()).exp()
        losses.append(clipped_loss(ratio, advantage) / (1 if normalised else len(path)))
        stopped.append(float(torch.autograd.grad(losses[-1], ratio, retain_graph=True)[0]) == 0)
        assert node == path[0]
    assert 0 < sum(stopped) < len(stopped)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("tree", ["chain", "window"])
def test_gradients_are_those_of_gspo_through_the_ratio_of_each_trajectory(tmp_path, tree, normalised):
    run = begun(tmp_path, PRESETS[tree], {**WHOLE, "normalised": normalised}, train__micro_batch=5, run__staleness=1)
    credited = credit(run, run.rollout(0, run.groups(0)))
    moved(run, 0.1)
    expected = gradient_of(run, of_trajectories(run, credited, normalised=normalised))
    assert expected.norm() > 1e-3
    before = run.policy.evaluations
    torch.testing.assert_close(gradient(run, credited), expected, rtol=1e-3, atol=1e-5)
    replayed = sum(len(e.rows) for e in credited.tree.evaluations if e.trained and e.part == 0)
    assert run.policy.evaluations - before == 2 * replayed  # a first pass without gradient


@pytest.mark.parametrize("tree", ["brush", "branch", "twigs"])
def test_edges_above_a_split_take_the_geometric_mean_of_the_trajectories_through_them(tmp_path, tree):
    run = begun(tmp_path, PRESETS[tree], WHOLE, run__staleness=1)
    credited = credit(run, run.rollout(0, run.groups(0)))
    moved(run, 0.1)
    log_ratios = {node: own_log_ratio(run, credited.tree, *where) for node, where in trained(credited.tree, 0).items()}
    ends = trajectories(credited.tree, log_ratios)
    (length,) = {len(path) for path in ends.values()}
    weight = credited.units.to_edges(credited.units.weight)
    loss = torch.zeros(())
    for node, own in log_ratios.items():
        through = [sum(log_ratios[each].detach() for each in path) for path in ends.values() if node in path]
        ratio = (sum(through) / len(through) / length + own - own.detach()).exp()
        loss = loss + weight[node] * clipped_loss(ratio, float(credited.of_edges(torch.tensor([node]))))
    shared = any(sum(node in path for path in ends.values()) > 1 for node in log_ratios)
    assert shared == (tree == "branch")
    expected = gradient_of(run, loss / sum(float(weight[node]) for node in log_ratios))
    torch.testing.assert_close(gradient(run, credited), expected, rtol=1e-3, atol=1e-5)


def test_trajectories_are_scored_first_only_where_the_policy_may_have_moved(tmp_path):
    """The first update of a new rollout costs what it does with another ratio; its steps have the policy gradient."""
    run = begun(tmp_path, "flow_grpo", {**WHOLE, "clip_range": 1e-9}, train__updates=2, train__split="samples")
    credited = credit(run, run.rollout(0, run.groups(0)))
    rows = [sum(len(e.rows) for e in credited.tree.evaluations if e.trained and e.part == part) for part in range(2)]
    for part, times in enumerate((1, 2)):
        before = run.policy.evaluations
        stats = run.take_step(credited, part)
        assert run.policy.evaluations - before == times * rows[part]
        assert (stats.clipped > 0) == (part > 0)
    late = begun(tmp_path / "late", "flow_grpo", WHOLE, run__staleness=1)
    assert [late.config.moved(part) for part in range(2)] == [True, True]


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
    for objective in ({**PREFIX, "clip_range": [9.0, 9.0], "dual": None}, {**PLAIN, "name": "trajectory_ratio"}, PLAIN):
        folder = tmp_path / objective["name"]
        run = begun(folder, preset, objective, tree, train__updates=2, train__iterations=4, run__staleness=2)
        run.run()
        ends.append((weights_of(run), lines(run)))
    assert ends[0][1] == ends[2][1]
    assert ends[0][1][-1]["policy/max_abs_log_ratio"] > 1e-3
    for name, tensor in ends[2][0].items():
        assert torch.equal(tensor, ends[0][0][name])
        assert torch.equal(tensor, ends[1][0][name])


def test_the_second_optimizer_step_has_paths_under_the_weights_of_the_first(tmp_path):
    """At a rollout of the present policy the first step has ratios of 1; those of the second part tell what it moved."""
    run = begun(tmp_path, "flow_grpo", train__updates=2, train__split="samples")
    credited = credit(run, run.rollout(0, run.groups(0)))
    seen = []
    for part in range(2):
        expected = gradient_of(run, by_hand(run, credited, part))
        before = [p.detach().clone() for p in run.weights.parameters]
        stats = run.take_step(credited, part)
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
    run = begun(tmp_path, PRESETS[tree], {**PREFIX, "clip_range": 1e-9})
    stats = step_in_place(run, credit(run, run.rollout(0, run.groups(0))))
    assert (stats.max_abs_log_ratio, stats.clipped) == (0.0, 0)
    assert stats.grad_norm > 0


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
    earlier, position = entered(prune(tree, keep, 4), torch.ones(len(tree.nodes)))
    below = next(i for i, node in enumerate(tree.nodes) if node.parent == left)
    assert (earlier[below], position[below]) == (1.0, 2)
    assert math.isclose(sum(earlier.values()), 6 * (0 + 1 + 2) - 2)


KERNEL = Kernel("dance_sde", 0.8)
TIMES = (1.0, 0.6, 0.3, 0.0)
BEFORE = torch.tensor([-2.0, -1.0, -1.5], dtype=torch.float64)  # velocities of the steps, whatever the state
SINCE = torch.tensor([-2.6, -1.8, -2.0], dtype=torch.float64)
POINTS = 10  # of a quadrature over the noise of a step


class Shifts(torch.nn.Module):
    """A velocity for each step, the same at all states."""

    def __init__(self):
        super().__init__()
        self.velocity = torch.nn.Parameter(BEFORE.float())

    def forward(self, x, sigma, rows):
        step = [abs(time - float(sigma[0])) < 1e-6 for time in TIMES].index(True)
        return self.velocity[step].expand_as(x)


def mean_end(velocity):
    """Mean of the end of a path that starts at 0: every step is affine in state and velocity."""
    mean = torch.zeros((), dtype=torch.float64)
    for step, times in enumerate(pairwise(TIMES)):
        by = [
            transition(KERNEL, (torch.tensor([[x]]),), (torch.tensor([[v]]),), *times, TIMES[1])[0][0].item()
            for x, v in ((1.0, 0.0), (0.0, 1.0))
        ]
        mean = by[0] * mean + by[1] * velocity[step]
    return mean


def slopes(reached):
    """Derivative of E[x^2] = mean^2 + const in the velocity of each step t, at the velocities reached(t) of all."""
    found = []
    for step in range(3):
        velocity = reached(step).clone().requires_grad_()
        found.append(torch.autograd.grad(mean_end(velocity) ** 2, velocity)[0][step])
    return torch.stack(found).float()


def test_in_expectation_a_gradient_is_that_of_the_new_path_to_its_step_and_the_old_one_after_it():
    """In closed form, for the reward x^2 of Gaussian paths; the ratio of a step alone has the old path before it, too.

    The product over the trajectory has the new path before and after the step: the gradient of the new policy's reward.
    """
    nodes, masses = np.polynomial.hermite_e.hermegauss(POINTS)
    masses = masses / masses.sum()
    digits = [np.unravel_index(i, (POINTS,) * 3) for i in range(POINTS**3)]
    policy = FieldPolicy(Shifts(), (1,), TIMES)
    weights = Weights(policy.modules, None)
    (velocity,) = weights.parameters
    roots, start = [Root(0, i, None) for i in range(len(digits))], (torch.zeros(len(digits), 1),)

    def point(shape, group, path, step, component):
        return torch.full(shape, nodes[digits[path[0]][step]])

    with torch.no_grad():
        plan = chain([KERNEL] * 3, range(3), range(3))
        tree = grow(plan, TIMES, roots, start, policy.velocity, point, len(digits))
        velocity.copy_(SINCE)
    of_edge = torch.full((len(tree.nodes),), -1)
    for unit, leaf in enumerate(tree.leaves):
        of_edge[tree.ancestry(leaf)] = unit
    mass = torch.tensor([masses[list(own)].prod() for own in digits])
    nothing = torch.zeros(len(digits), 1)
    credited = Credited(
        tree=tree,
        units=CreditUnits(nothing, nothing, mass, of_edge, root=nothing[:, 0]),
        advantages=tree.samples[0][:, 0] ** 2,
        step_weights=dict.fromkeys(tree.trained_steps, 1.0),
        beta=0.0,
        group_weight=torch.ones(len(digits)),
    )

    def slope(objective):
        same, scaler = (lambda x: x), torch.amp.GradScaler("cpu", enabled=False)
        options = {"optimizer": torch.optim.SGD([velocity], lr=0.0), "scaler": scaler, "max_grad_norm": math.inf}
        options |= {"weights": weights, "sum_shards": same, "sum_processes": same, "moved": True}
        update_part(policy, credited, 0, objective=objective, **options)
        return -3 * velocity.grad.clone()  # the loss is the mean over the three edges of a path

    index = torch.arange(3)
    paths = slopes(lambda step: torch.where(index <= step, SINCE, BEFORE))
    alone = slopes(lambda step: torch.where(index == step, SINCE, BEFORE))
    torch.testing.assert_close(slope(PrefixRatio(clip_range=50.0)), paths, rtol=5e-3, atol=0)
    product = TrajectoryRatio(clip_range=1e9, normalised=False)
    torch.testing.assert_close(slope(product), slopes(lambda step: SINCE), rtol=5e-3, atol=0)
    torch.testing.assert_close(slope(Clip(clip_range=1e9)), alone, rtol=5e-3, atol=0)
    assert (paths[1:] / alone[1:] > 1.05).all()
