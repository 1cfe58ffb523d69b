"""Final samples of trees that split: credit by noise level, and states drawn between a sample and what it shares."""

from collections import defaultdict

import pytest
import torch
from field import credit, lines, settings, trainer
from oracle_samples import between

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.likelihood import bridge_moments
from samplers.kernels import DPM2, Kernel

SPLIT = {
    "tree": {"name": "branch_window", "size": 0, "siblings": "own", "splits": [2]},
    "kernel": {"name": "flow_sde", "level": 0.7},
    "credit": {"name": "nested", "group": 0.5, "siblings": 0.5, "starts": True},
    "baseline": {"name": "leave_one_out", "std": "none", "clip": 1e9},
}
DRAWS = {"draws": 6, "times": "strata"}


def run_of(folder, likelihood=(), **changes):
    algorithm = {"preset": "awm_fast", **SPLIT, "likelihood": {**DRAWS, "steps": None, **dict(likelihood)}}
    for axis, options in changes.pop("algorithm", {}).items():
        algorithm[axis] = {**algorithm[axis], **options}
    sizes = {"train__group_size": 4, "train__groups": 2, "train__updates": 1, "train__iterations": 2}
    return trainer(settings(folder, algorithm=algorithm, **{**sizes, **changes}))


def brush_run(folder, changes):
    algorithm = {"preset": "awm_brush", **{axis: {**SPLIT.get(axis, {}), **own} for axis, own in changes.items()}}
    algorithm |= {
        "tree": changes["tree"],
        "baseline": {**SPLIT["baseline"], "scale": 1.0},
        "likelihood": {**DRAWS, "steps": None},
    }
    return trainer(settings(folder, algorithm=algorithm, train__group_size=4, train__groups=2, train__updates=1))


def rolled(run):
    batch = run.rollout(0, run.groups(0))
    return batch, credit(run, batch)


@pytest.mark.parametrize(("t", "s"), [(0.2, 0.5), (0.49, 0.5), (0.7, 0.9), (0.001, 0.8)])
def test_a_bridge_has_the_moments_of_the_path_between_a_sample_and_a_shared_state(t, s):
    assert bridge_moments(t, s) == pytest.approx(between(t, s), rel=1e-6)


def test_a_bridge_ends_at_the_sample_and_at_the_shared_state_and_is_plain_noise_from_the_start():
    assert bridge_moments(0.5, 0.5) == (0.0, 1.0, 0.0)
    assert bridge_moments(1e-9, 0.5) == pytest.approx((1, 0, 0), abs=1e-8)
    assert bridge_moments(0.3, 1.0) == pytest.approx((0.7, 0.0, 0.3))


def test_a_draw_takes_the_advantage_of_the_edge_at_its_noise_level(tmp_path):
    batch, credited = rolled(run_of(tmp_path))
    tree, noised, rewards = batch.tree, credited.noised, batch.scores.values[:, 0]
    split = tree.sigmas[2]
    of_root = defaultdict(list)
    for leaf, node in enumerate(tree.leaves):
        of_root[tree.nodes[node].root.group, tree.nodes[node].root.index].append(leaf)
    assert sorted(map(len, of_root.values())) == [2] * 4
    levels = set()
    for call in noised.calls:
        for draw in call.draws:
            root = noised.node(draw).root
            own = of_root[root.group, root.index]
            other = of_root[root.group, 1 - root.index]
            (sibling,) = set(own) - {draw.leaf}
            below = draw.sigma <= split
            if below:
                value = rewards[draw.leaf]
                expected = 0.5 * (value - rewards[[sibling, *other]].mean()) + 0.5 * (value - rewards[sibling])
            else:
                expected = rewards[own].mean() - rewards[other].mean()
            assert float(noised.advantages[draw.edge]) == pytest.approx(float(expected), abs=1e-6)
            assert (draw.shared is not None) == below
            levels.add(below)
    assert levels == {True, False}
    assert sum(len(call.draws) for call in noised.calls) == 8 * 6


def test_states_below_a_split_lie_between_the_sample_and_the_shared_state(tmp_path):
    _, credited = rolled(run_of(tmp_path))
    noised = credited.noised
    for call in noised.calls:
        (state,), target = noised.noised(call)
        for row, draw in enumerate(call.draws):
            clean = noised.tree.samples[0][draw.leaf]
            torch.testing.assert_close(state[row], clean + draw.sigma * target[row])
            if draw.shared is not None and draw.sigma == noised.tree.nodes[draw.shared].sigma:
                torch.testing.assert_close(state[row], noised.tree.shared[draw.shared][0])


def test_with_all_weight_on_the_group_a_tree_that_splits_at_once_is_a_group_of_chains(tmp_path):
    changes = {"tree": {"splits": [0]}, "credit": {"group": 1.0, "siblings": 0.0}}
    batch, credited = rolled(run_of(tmp_path, algorithm=changes))
    noised, tree = credited.noised, batch.tree
    groups = torch.tensor([tree.nodes[leaf].root.group for leaf in tree.leaves])
    for call in noised.calls:
        (state,), target = noised.noised(call)
        for row, draw in enumerate(call.draws):
            own = noised.node(draw).root.group
            others = (groups == own) & (torch.arange(8) != draw.leaf)
            expected = batch.scores.values[draw.leaf, 0] - batch.scores.values[others, 0].mean()
            assert float(noised.advantages[draw.edge]) == pytest.approx(float(expected), abs=1e-9)
            assert draw.shared is None
            torch.testing.assert_close(state[row], tree.samples[0][draw.leaf] + draw.sigma * target[row])


def test_a_lost_reward_costs_its_sample_alone(tmp_path):
    run = run_of(tmp_path)
    batch = run.rollout(0, run.groups(0))
    batch.scores.values[0] = torch.nan
    noised = credit(run, batch).noised
    left = {draw.leaf for call in noised.calls for draw in call.draws}
    assert left == set(range(1, 8))
    assert noised.advantages[[draw.edge for call in noised.calls for draw in call.draws]].isfinite().all()


def test_each_draw_is_tied_to_the_last_split_above_it(tmp_path):
    tree = {"splits": [1, 3]}
    noised = rolled(run_of(tmp_path, algorithm={"tree": tree}, train__group_size=8))[1].noised
    nodes, seen = noised.tree.nodes, set()
    for call in noised.calls:
        for draw in call.draws:
            step = None if draw.shared is None else nodes[draw.shared].step
            levels = [at for at in (1, 3) if noised.tree.sigmas[at] >= draw.sigma]
            assert step == (levels[-1] if levels else None)
            assert nodes[draw.edge].step == (step + 1 if levels else 1)
            seen.add(step)
    assert seen == {None, 1, 3}


def branch_step(tree, end):
    """The step at which the branch of an end leaves its trunk."""
    side = min(node for node in tree.ancestry(end) if tree.nodes[node].role == "side")
    return tree.nodes[tree.nodes[side].parent].step


def test_a_brush_s_trunk_takes_credit_for_what_it_leads_to(tmp_path):
    """Two branches leave the trunk at step 1, and two at step 2, where it ends."""
    changes = {"tree": {"name": "brush", "branches": 2, "profile": [0, 2, 2]}, "credit": {"group": 0, "siblings": 1}}
    batch, credited = rolled(brush_run(tmp_path, changes))
    tree, noised, rewards = batch.tree, credited.noised, batch.scores.values[:, 0]
    trunk = set()
    for call in noised.calls:
        for draw in call.draws:
            edge, root = tree.nodes[draw.edge], noised.node(draw).root
            own = [leaf for leaf, node in enumerate(tree.leaves) if tree.nodes[node].root == root]
            began = {leaf: branch_step(tree, tree.leaves[leaf]) for leaf in own}
            above = [at for at in (1, 2) if at <= began[draw.leaf] and tree.sigmas[at] >= draw.sigma]
            assert edge.step == (above[-1] + 1 if above else 1)
            assert (None if draw.shared is None else tree.nodes[draw.shared].step) == (above[-1] if above else None)
            if above == [1] and began[draw.leaf] == 2:
                late, early = ([rewards[leaf] for leaf in own if began[leaf] == at] for at in (2, 1))
                expected = torch.stack(late).mean() - torch.stack(early).mean()
                assert float(noised.advantages[draw.edge]) == pytest.approx(float(expected), abs=1e-6)
                trunk.add(draw.edge)
    assert len(trunk) == 4
    assert sorted(sum(tree.nodes[node].root.index == i for node in tree.leaves) for i in (0, 1)) == [8, 8]


def test_steps_without_noise_are_of_second_order_if_asked(tmp_path):
    tree = rolled(run_of(tmp_path, algorithm={"kernel": {"solver": "dpm2"}}))[0].tree
    kernels = {(tree.nodes[edges.nodes[0]].step - 1, edges.move.kernel) for e in tree.evaluations for edges in e.edges}
    steps = len(tree.sigmas) - 1
    assert kernels == {(step, Kernel("flow_sde", 0.7) if step == 2 else DPM2) for step in range(steps)}


def test_two_optimizer_steps_share_the_samples(tmp_path):
    changes = {"train__updates": 2, "train__split": "groups"}
    run = run_of(tmp_path, {"antithetic": True}, **changes)
    noised = rolled(run)[1].noised
    assert {call.part for call in noised.calls} == {0, 1}
    assert sum(len(call.draws) for call in noised.calls) == 2 * 8 * 6
    run.run()
    assert all(line["policy/grad_norm"] > 0 for line in lines(run))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"credit": {"starts": False}},
            r"algorithm\.credit: elbo trains at all noise levels of a sample, but nested without",
        ),
        ({"kernel": {"name": "ode", "level": None}}, r"algorithm\.kernel: ode adds no noise where a tree splits"),
        (
            {"tree": {"prune": {"rule": "extremes"}}},
            r"algorithm\.tree\.prune: elbo trains on samples",
        ),
        (
            {"tree": {"name": "brush", "finish": 2}},
            r"algorithm\.tree\.finish: elbo trains on finished samples, so the finish must be exact; take null",
        ),
        (
            {"tree": {"name": "branch", "siblings": "own"}, "kernel": {"solver": "dpm2"}},
            r"algorithm\.kernel\.solver: the steps of branch have noise",
        ),
        (
            {"tree": {"name": "twigs"}},
            r"algorithm\.tree: elbo trains on the ends of chains or of trees that split, not of twigs",
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence(tmp_path, changes, said):
    algorithm = {"preset": "awm_split", "likelihood": DRAWS}
    for axis, options in changes.items():
        kept = {} if "name" in options else SPLIT[axis]
        algorithm[axis] = {key: value for key, value in {**kept, **options}.items() if value is not None}
    with pytest.raises(InputError, match=said):
        settings(tmp_path, algorithm=algorithm)


def test_what_a_run_cannot_do_with_trees_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"algorithm\.tree: a group is one tree, so nothing is compared above step 2"):
        run_of(tmp_path, train__group_size=2)
    with pytest.raises(
        InputError, match=r"algorithm\.tree\.start: all trees of a group share the ODE steps above step 2"
    ):
        run_of(tmp_path, algorithm={"tree": {"start": "shared"}})
    with pytest.raises(InputError, match=r"so nothing is compared above step 1; split at step 0"):
        brush_run(tmp_path, {"tree": {"name": "brush", "branches": 4, "profile": [0, 4]}})
    late = {"preset": "awm_split", "likelihood": {**DRAWS, "steps": [2, -1]}}  # no draw lies above the split
    assert settings(tmp_path, algorithm=late, train__group_size=2).algorithm.likelihood.steps == [2, -1]
    with pytest.raises(
        InputError, match=r"algorithm\.tree: stored samples are ends of chains, but branch_window splits"
    ):
        run_of(tmp_path, data__groups=str(tmp_path))
