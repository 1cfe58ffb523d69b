"""Training on text trees through the command's own door."""

import copy
import json

import pytest
import runs
import torch
from runs import metrics
from safetensors.torch import load_file

from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm import trainer, update
from flowgrpo.mdlm.planning.plan import plan, predict_cost, table
from flowgrpo.training.reports.tree_store import TreeFolder

TREE = {
    "algorithm__preset": "cj_grpo",
    "algorithm__tree": {"name": "branch", "factor": 2, "splits": [0.25, 0.5]},
    "algorithm__credit": "nested",
    "algorithm__baseline": "leave_one_out",
    "eval__every": 16,
    "eval__prompts": 1,
    "eval__save": 0,
}


def weights(done):
    return load_file(max((done.folder / "checkpoints").iterdir()) / "weights.safetensors")


@pytest.mark.parametrize("credit", ["nested", "siblings", "depthwise", "terminal"])
def test_trees_learn_from_their_reward(settings, credit):
    chosen = {**TREE, "algorithm__credit": credit, "train__iterations": 12, "train__updates": 1, "train__ema": None}
    rewards = [line["reward/mean"] for line in metrics(run.train_config(settings(**chosen)).folder)]
    assert sum(rewards[-3:]) > sum(rewards[:3])


GAIN = {
    **{key: value for key, value in TREE.items() if "tree" not in key},
    "algorithm__credit": "step_gain",
    "algorithm__baseline": "group_mean",
}


def test_gains_of_steps_teach(settings):
    chosen = {**GAIN, "train__iterations": 12, "train__updates": 1, "train__ema": None, "run__trees": {"every": 6}}
    done = run.train_config(settings(**chosen))
    rewards = [line["reward/mean"] for line in metrics(done.folder)]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert (done.folder / "trees.html").is_file()


def test_predictions_are_not_kept_after_they_are_scored(settings, monkeypatch):
    met = []
    real = trainer.update_batches

    def update_batches(*arguments, **options):
        met.append(arguments[3])
        return real(*arguments, **options)

    monkeypatch.setattr(trainer, "update_batches", update_batches)
    run.train_config(settings(**{**GAIN, "train__iterations": 1, "train__updates": 1}))
    (batch,) = met
    assert batch.drafts.shape == (32, 4, 1)
    assert batch.completions.rollout.drafts.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"run__engine": {"url": "http://localhost:1"}},
            "algorithm.credit: an engine returns no predictions of single steps; take terminal",
        ),
        (
            {"algorithm__tree": "branch"},
            "algorithm.credit: step_gain credits the steps of single answers, take .*=chain",
        ),
        ({"algorithm__decoder__cache": "dual"}, "algorithm.decoder.cache: step_gain reads the prediction of the whole"),
        (
            {"algorithm__preset": "co_grpo"},
            "algorithm.schedule: step_gain gives no advantage to a whole answer; take none",
        ),
        (
            {"algorithm__preset": "igpo"},
            "algorithm.hints: step_gain credits steps that given tokens would skip, take none",
        ),
        (
            {"algorithm__objective": "linear_bound"},
            "linear_bound trains whole answers, but step_gain gives credit to parts of them",
        ),
        ({"model__attention": "block", "model__block_size": 4}, "step_gain needs predictions of whole answers"),
        ({"rewards": ["own"]}, "step_gain scores single predictions, own compares a group"),
    ],
)
def test_what_does_not_fit_gains_of_steps_is_refused(settings, tmp_path, overrides, sentence):
    if "rewards" in overrides:
        overrides = {"rewards": [{"use": f"{tmp_path / 'mine.py'}:own"}]}
    with pytest.raises(InputError, match=sentence):
        run.train_config(settings(**{**GAIN, **overrides}))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "step_mean", "fixed_length", "balanced"])
def test_shared_tokens_are_evaluated_once_and_weigh_as_in_every_answer(settings, monkeypatch, aggregation):
    chosen = {"algorithm__aggregation": aggregation, "algorithm__baseline__drop_zero": True}
    assert agree(settings, monkeypatch, **chosen) < 0.8


@pytest.mark.parametrize(
    "changes",
    [
        {"model__length": 8, "algorithm__decoder": {"eos_early_stop": True, "region": {"block_length": 2}}},
        {
            "model__attention": "block",
            "model__block_size": 4,
            "model__length": 8,
            "algorithm__tree__splits": [0.5, 0.75],  # a view has a step of each block
        },
        {"train__split": "samples"},
        {"train__passes": 2},
        {"train__select": {"fraction": 0.5}},
    ],
)
def test_shared_tokens_are_evaluated_once_whichever_answers_and_tokens_there_are(settings, monkeypatch, changes):
    assert agree(settings, monkeypatch, train__groups=2, **changes) < 1


def agree(settings, monkeypatch, **changes):
    """Train an iteration with shared tokens once and in every answer; return the share of evaluations that are left."""
    chosen = {**TREE, "train__iterations": 1, **changes}
    once = run.train_config(settings(run__name="once", **chosen))
    monkeypatch.setattr(update, "_branches", lambda config, batch: None)
    often = run.train_config(settings(run__name="often", **chosen))
    (one,), (other,) = metrics(once.folder), metrics(often.folder)
    assert one["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-4)
    for name, tensor in weights(once).items():
        torch.testing.assert_close(tensor, weights(often)[name], rtol=0, atol=1e-5)
    return one["cost/update_evaluations"] / other["cost/update_evaluations"]


@pytest.mark.parametrize("changes", [{}, {"algorithm__likelihood": "one_step", "algorithm__credit": "terminal"}])
def test_a_tree_costs_what_was_planned(settings, changes):
    chosen = settings(**{**TREE, **changes, "train__iterations": 1, "train__updates": 1})
    (line,) = metrics(run.train_config(chosen).folder)
    cost = predict_cost(chosen)
    assert cost.rollout == line["cost/rollout_evaluations"] < 32 * 4
    assert cost.update == line["cost/update_evaluations"]
    planned = plan(chosen)
    assert planned["geometry"]["roots"] == 2
    assert ("trees", "2 in a group, of 4 answers") in table(planned)


CANVAS = {"algorithm__likelihood__scope": "canvas"}
HALF = {"algorithm__tree": {"name": "branch", "factor": 2, "splits": [0.5]}}
QUARTERS = {"algorithm__tree": {"name": "branch", "factor": 2, "splits": [0.25, 0.75]}}
ENTROPY = {"name": "branch", "factor": 2, "splits": [0.25, 0.5, 0.75], "depth": 2, "entropy": 2.05}
ASCENDING = {"name": "low_confidence", "steps": 8, "region": {"name": "ascending", "blocks": 2}}
BY_BRANCH = {"algorithm__preset": "d_tree_rpo", "algorithm__credit": "siblings", "model__length": 8}
ONE_STEP = {"algorithm__likelihood": "one_step", "algorithm__credit": "siblings"}

# overrides, and whether the counts of the rollout and of the update are exact
COSTS = [
    ({**CANVAS, **HALF, "algorithm__decoder": "entropy"}, (True, True)),  # some of its steps commit nothing
    ({**CANVAS, **QUARTERS, "algorithm__decoder": "entropy", "model__length": 8}, (True, True)),
    # the first block, of three tokens, takes three of its four steps
    ({**CANVAS, **HALF, "algorithm__decoder": ASCENDING, "model__length": 8}, (True, True)),
    ({**CANVAS, **HALF, "algorithm__decoder": {"name": "threshold", "region": {"block_length": 2}}}, (False, False)),
    ({**CANVAS, **HALF, "algorithm__decoder__steps": 2, "model__length": 8}, (True, True)),
    (
        {**HALF, "algorithm__likelihood__scope": "eos", "algorithm__decoder__steps": 2, "model__length": 8},
        (True, False),
    ),
    ({**BY_BRANCH, **CANVAS}, (True, True)),
    ({**BY_BRANCH, **HALF, "algorithm__likelihood__scope": "eos"}, (True, False)),
    # both tokens are written behind the split
    ({**BY_BRANCH, **CANVAS, **HALF, "algorithm__decoder": "entropy", "model__length": 2}, (True, True)),
    ({**CANVAS, "algorithm__tree": ENTROPY}, (False, False)),
    ({**BY_BRANCH, **CANVAS, "algorithm__tree": ENTROPY}, (False, False)),
    ({**ONE_STEP, "train__select": {"fraction": 0.5}}, (True, False)),
    (
        {**ONE_STEP, "algorithm__credit": "depthwise", "train__select__fraction": 0.25, "train__group_size": 16},
        (True, False),
    ),
    ({**ONE_STEP, "algorithm__credit": "terminal", "train__select": {"fraction": 0.5}}, (True, True)),
    ({**ONE_STEP, "algorithm__credit": "terminal", "train__select": {"fraction": 0.25, "end": 1.0}}, (True, False)),
    ({**CANVAS, "train__select": {"fraction": 0.5}}, (True, False)),
    ({**CANVAS, "algorithm__baseline__drop_zero": True}, (True, False)),
]


@pytest.mark.parametrize(("changes", "exact"), COSTS)
def test_a_tree_costs_exactly_or_at_most_what_was_planned(settings, changes, exact):
    iterations = 2 if "end" in changes.get("train__select", {}) else 1
    chosen = settings(**{**TREE, **changes, "train__iterations": iterations, "train__updates": 1})
    cost, lines = predict_cost(chosen), metrics(run.train_config(chosen).folder)
    assert (cost.rollout_fixed, cost.update_fixed) == exact
    assert cost.with_gradient <= 4 * chosen.train.group_size * cost.views
    for line in lines:
        for planned, fixed, part in zip((cost.rollout, cost.update), exact, ("rollout", "update"), strict=True):
            spent = line[f"cost/{part}_evaluations"]
            assert spent == planned if fixed else spent <= planned


def test_blocks_that_are_counted_from_the_prompt_cost_at_most_their_answers(settings):
    blocks = {"model__attention": "block", "model__block_size": 4, "model__length": 7, "train__group_size": 4}
    chosen = settings(**{**TREE, **BY_BRANCH, **CANVAS, **HALF, **blocks, "train__iterations": 1, "train__updates": 1})
    (line,), cost = metrics(run.train_config(chosen).folder), predict_cost(chosen)
    assert (cost.rollout_fixed, cost.update_fixed) == (False, False)
    assert line["cost/rollout_evaluations"] <= cost.rollout
    assert line["cost/update_evaluations"] <= cost.update


def test_rewards_of_predictions_are_counted_at_most(settings):
    planned = plan(settings(**GAIN))
    assert planned["reward_calls"] == 32 * (1 + 4)  # each of 4 steps, and the answer
    assert planned["at_most"]["reward_calls"]
    assert "at most 160 rewards" in dict(table(planned))["decoded"]
    assert not plan(settings(**TREE))["at_most"]["reward_calls"]


def test_a_tree_that_was_stopped_goes_on_as_if_it_had_not_been(settings):
    whole = run.train_config(settings(**TREE, run__name="whole", train__iterations=3))
    chosen = {**TREE, "run__name": "parts"}
    run.train_config(settings(**chosen, train__iterations=1))
    parts = run.train_config(settings(**chosen, train__iterations=3, run__resume=True))
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parts)[name])


def test_two_processes_train_what_one_does(settings, tmp_path):
    choices = {**TREE, "train__groups": 3, "train__updates": 1, "algorithm__objective__kl": {"beta": 0.1}}
    one = metrics(run.train_config(settings(run__name="one", **choices)).folder)
    words = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in choices.items()]
    process = runs.background("train", str(tmp_path / "run.yaml"), *words, "run.processes=2", "run.name=two")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    for line, other in zip(one, metrics(tmp_path / "runs" / "two"), strict=True):
        for key in ("reward/mean", "cost/model_evaluations", "cost/trained_edges"):
            assert line[key] == other[key]
        assert line["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-3)


def test_a_branch_of_a_lost_answer_is_trained_by_the_others(settings, tmp_path, monkeypatch):
    met = []
    real = update.update_on

    def update_on(config, policy, update_batch, batch, **options):
        met.append(update_batch)
        return real(config, policy, update_batch, batch, **options)

    monkeypatch.setattr(trainer, "update_on", update_on)
    (tmp_path / "some.py").write_text("def some(texts, prompts): return [None, *(len(set(t)) / 4 for t in texts[1:])]")
    reward = [{"use": f"{tmp_path / 'some.py'}:some"}]
    run.train_config(settings(**TREE, rewards=reward, train__iterations=1, train__updates=1))
    (batch,) = met
    lost = batch.weight[0] == 0
    assert lost.any()
    assert not lost.all()
    assert not batch.answers.scored[0][lost].any()


def test_trees_that_choose_their_places_are_trained_and_kept(settings):
    tree = {"name": "branch", "factor": 2, "splits": [0.25, 0.5, 0.75], "depth": 2, "entropy": 2.05}
    chosen = settings(**{**TREE, "algorithm__tree": tree, "run__trees": {"every": 1, "prompts": 1}})
    done = run.train_config(chosen)
    cost = predict_cost(chosen)
    for line in metrics(done.folder):
        assert line["policy/max_abs_log_ratio"] < 1e-5
        assert line["cost/rollout_evaluations"] <= cost.rollout
        assert line["cost/update_evaluations"] <= cost.update
    assert (done.folder / "trees.html").is_file()


def test_kept_trees_share_the_canvases_of_a_branch(settings):
    chosen = {**TREE, "run__trees": {"every": 1, "prompts": 1}, "train__iterations": 1}
    done = run.train_config(settings(**chosen))
    (tree,) = TreeFolder(done.folder).read()
    leaves = [place for place, node in enumerate(tree.nodes) if not node.estimated]
    assert len(leaves) == 8
    assert sum(node.parent is None for node in tree.nodes) == 2
    children = [sum(other.parent == place for other in tree.nodes) for place in range(len(tree.nodes))]
    assert sorted(children)[-6:] == [2] * 6
    assert all(tree.nodes[leaf].sigma == 0 for leaf in leaves)
    credited = [node for node in tree.nodes if node.unit is not None]
    assert len(credited) == len(tree.nodes) - 2  # all but the starts
    assert len({node.unit for node in credited}) == 14
    assert all(node.advantage is not None and node.updated for node in credited)
    assert (done.folder / "trees.html").is_file()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"algorithm__tree": "chain"}, "algorithm.credit: nested compares branches, take algorithm.tree=branch"),
        ({"train__group_size": 6}, "train.group_size: 6 does not divide by the 4 leaves of a tree .*, take 4 or 8"),
        (
            {"algorithm__objective": "sequence_ratio"},
            "sequence_ratio trains whole .*; take token_ratio or prefix_ratio",
        ),
        ({"algorithm__baseline": "median"}, "algorithm.baseline: credit nested .* take leave_one_out or group_mean"),
        (
            {"algorithm__tree__splits": [0.1]},
            r"algorithm.tree.splits: \[0.1\] are not ascending places .* 4 steps, take",
        ),
        ({"algorithm__tree__splits": [1.5]}, "algorithm.tree.splits.0"),
        (
            {"algorithm__decoder__cache": "dual"},
            r"algorithm.tree.splits: .* not ascending places .* decode of 1 blocks",
        ),
        ({"algorithm__baseline": "tracker"}, "algorithm.baseline: tracker compares whole answers .*take group_mean or"),
        ({"algorithm__tree__depth": 1}, "algorithm.tree.depth: without algorithm.tree.entropy all splits are taken"),
        ({"algorithm__tree__entropy": 1.0}, "algorithm.tree.depth: entropy chooses some of 2 splits, take 1$"),
        ({"algorithm__preset": "co_grpo"}, "algorithm.tree: answers of one branch cannot have schedules of their own"),
        (
            {"algorithm__preset": "igpo"},
            "algorithm.hints: hints replace single answers, but a tree shares their tokens; take none",
        ),
        (
            {"algorithm__credit": {"name": "nested", "group": 0, "siblings": 0}},
            "algorithm.credit: nested compares nothing",
        ),
    ],
)
def test_what_does_not_fit_a_tree_is_refused(settings, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        run.train_config(settings(**{**copy.deepcopy(TREE), **overrides}))
