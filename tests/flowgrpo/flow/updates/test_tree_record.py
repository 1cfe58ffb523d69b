"""Trees that a run keeps: of every preset, whole, and without any effect on what it learns."""

import json

import pytest
import torch
from cases import cases
from field import MANY_DRAWS, GaussianFlow, closeness, differing, lines, nearness, settings, trainer

from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.rollouts import state_preview
from flowgrpo.training.reports.tree_store import TreeFolder
from rewards import Reward

STEPS = 6
# Each tree, credit and way to rate final samples; what else is made of them a plain run leaves out.
PLAIN = ("flow_grpo", "tempflow", "adaptive", "branch_grpo", "dense_grpo", "stepwise_flow_grpo", "vgpo")
PLAIN += ("sage_grpo", "opd", "nft", "seppo")
pytestmark = pytest.mark.usefixtures("noise_drawn_once")


def run_of(folder, preset="flow_grpo", kept=True, resumed=False, **overrides):
    """Three iterations of two groups in the plane, of which the trees of the first group are kept of each."""
    few = {"likelihood": {"draws": 3}} if preset in MANY_DRAWS else {}
    few |= {"kernel": {"calibrate": {"rounds": 1}}} if preset == "dense_grpo" else {}
    sizes = {"train__iterations": 3, "train__groups": 2, "train__updates": 2}
    sizes["train__group_size"] = 16 if preset.startswith("branch") else 12
    trees = {"every": 1, "prompts": 1} if kept else None
    chosen = settings(folder, **{"algorithm": {"preset": preset, **few}, "run__trees": trees, **sizes, **overrides})
    reward = Reward("nearness", nearness) if preset == "vgpo" else Reward("closeness", closeness)
    run = trainer(chosen, GaussianFlow(), steps=STEPS, rewards=[reward], held_out=0)
    rollout, run.batches = run.rollout, []
    run.rollout = lambda iteration, groups: run.batches.append(rollout(iteration, groups)) or run.batches[-1]
    if resumed:
        run.resume()
    run.run()
    return run


@pytest.fixture(autouse=True)
def painted(monkeypatch):
    """Points are shown as grey pictures."""
    small = state_preview.small
    monkeypatch.setattr(state_preview, "small", lambda point, side: small(point[0].sigmoid().expand(3, 4, 4), side))


@pytest.mark.parametrize("preset", cases(PRESETS, PLAIN))
def test_the_trees_of_every_preset_are_kept_and_change_nothing(tmp_path, preset):
    brief = {"train__group_size": 6, "train__micro_batch": 8, "train__iterations": 2, "run__checkpoint__every": 9}
    run, plain = (run_of(tmp_path / name, preset, kept=name == "a", **brief) for name in "ab")
    assert lines(run) == lines(plain)
    assert not differing(run, plain)
    assert not (plain.folder / "trees").exists()
    kept = TreeFolder(run.folder).read()
    assert [tree.step for tree in kept] == [1, 2]
    batches = [batch for batch in run.batches if batch.previews]
    for tree, batch in zip(kept, batches, strict=True):
        assert tree.group == 0
        assert tree.sigmas == batch.tree.sigmas
        assert tree.names == tuple(reward.name for reward in run.rewards)
        leaves = [i for i, leaf in enumerate(batch.tree.leaves) if batch.tree.nodes[leaf].root.group == 0]
        samples = [node for node in tree.nodes if not node.estimated]
        assert sorted(node.rewards[0] for node in samples) == sorted(batch.scores.values[leaves, 0].tolist())
        assert {(node.sigma, node.step) for node in samples} == {(0, STEPS)}
        assert all(node.picture is not None and node.total is not None for node in tree.nodes)
        assert tree.size == (4, 4)
        assert all(node.seed is not None for node in tree.nodes if node.parent is None)
        earned = [node for node in tree.nodes if node.unit is not None]
        assert earned
        assert all(node.compared[0] == 0 for node in earned)
        assert any(node.updated and node.advantage for node in earned) or preset in ("opd",)


def test_a_state_is_shown_by_what_the_model_foretells_from_it(tmp_path):
    """Of data that are one point, every state's estimate is that point, and so is its reward."""

    class Point(GaussianFlow):
        def forward(self, x, sigma, rows):
            return (x - self.mean) / sigma[:, None]

    sizes = {"train__groups": 1, "train__group_size": 4, "train__updates": 1, "train__iterations": 1}
    chosen = settings(tmp_path, run__trees={"every": 1}, run__patience=None, **sizes)
    run = trainer(chosen, Point(), steps=STEPS)
    run.run()
    (tree,) = TreeFolder(run.folder).read()
    reward = float(closeness(torch.zeros(1, 2), [""]))
    assert sum(node.estimated for node in tree.nodes) == 4 * STEPS
    assert [node.total for node in tree.nodes if node.estimated] == pytest.approx([reward] * 4 * STEPS, abs=1e-4)


def test_a_node_knows_its_edge_and_what_it_earned(tmp_path):
    run = run_of(tmp_path, "tempflow_fast", train__updates=1, train__iterations=1)
    tree, *_ = TreeFolder(run.folder).read()
    edges = [node for node in tree.nodes if node.parent is not None]
    noisy = [node for node in edges if node.noise > 0]
    assert {node.kernel for node in noisy} == {"flow_sde 0.7"}
    assert {node.kernel for node in edges if node.noise == 0} == {"ode"}
    assert all(node.updated and node.unit is not None and node.log_prob is not None for node in noisy)
    assert all(node.unit is None and not node.trained for node in edges if node.noise == 0)
    by_set = {}
    for node in noisy:
        by_set.setdefault(node.compared, []).append(node.advantage)
    assert len(by_set) > 1
    assert all(sum(own) == pytest.approx(0, abs=1e-5) for own in by_set.values())


def test_pruned_edges_are_told_from_those_of_the_update(tmp_path):
    pruned = {"preset": "branch_grpo", "tree": {"prune": {"rule": "extremes", "fraction": 0.25}}}
    run = run_of(tmp_path, "branch_grpo", train__updates=1, train__iterations=1, algorithm=pruned)
    kept = [node for tree in TreeFolder(run.folder).read() for node in tree.nodes if node.trained]
    assert any(node.updated for node in kept)
    assert any(not node.updated for node in kept)


def test_a_solver_s_chain_has_a_state_for_every_step(tmp_path):
    run = run_of(tmp_path, "nft", train__iterations=1)
    tree, *_ = TreeFolder(run.folder).read()
    by_step = [sum(node.step == step for node in tree.nodes) for step in range(STEPS + 1)]
    assert by_step == [12] * (STEPS + 1)
    assert {node.kernel for node in tree.nodes if node.parent is not None} == {"dpm2"}
    assert all(node.updated == node.trained == (node.unit is not None) == (node.step == STEPS) for node in tree.nodes)


def test_only_the_iterations_and_prompts_that_were_asked_for_are_kept(tmp_path):
    run = run_of(tmp_path, train__iterations=6, train__group_size=2, run__trees={"every": 4, "prompts": 5})
    kept = [(tree.step, tree.group) for tree in TreeFolder(run.folder).read()]
    assert kept == [(step, group) for step in (1, 5, 6) for group in (0, 1)]


def test_a_resumed_run_keeps_the_trees_of_one_that_was_never_stopped(tmp_path):
    few = {"train__group_size": 4, "train__updates": 1}
    whole = run_of(tmp_path / "a", **few)
    run_of(tmp_path / "b", **few | {"train__iterations": 2})
    (tmp_path / "b/r/trees/step-000009").mkdir()
    (tmp_path / "b/r/trees/step-000009/0000.json").write_text("of another life")
    rest = run_of(tmp_path / "b", resumed=True, **few)
    assert TreeFolder(rest.folder).read() == TreeFolder(whole.folder).read()


def test_a_lost_reward_is_no_number(tmp_path):
    def half(samples, prompts):
        return [float("nan") if x[0] > 0 else float(x[1]) for x in samples]

    chosen = settings(tmp_path, train__iterations=1, run__trees={"every": 1})
    run = trainer(chosen, GaussianFlow(), rewards=[Reward("half", half)])
    run.run()
    file = sorted((run.folder / "trees").glob("*/*.json"))[0]
    assert "NaN" not in file.read_text()
    nodes = [node for tree in TreeFolder(run.folder).read() for node in tree.nodes]
    assert {node.total is None for node in nodes} == {True, False}
    assert json.loads(file.read_text())["step"] == 1
