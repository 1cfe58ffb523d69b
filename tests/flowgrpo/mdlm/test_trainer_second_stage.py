"""Text runs whose hard groups get further answers after their first rewards."""

from dataclasses import replace

import pytest
import runs
import torch
from in_turn import after_first_step
from runs import metrics

from flowgrpo import config
from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm.planning.plan import plan, table
from flowgrpo.training.reports.tree_store import TreeFolder
from flowgrpo.training.state import RunState

STAGED = {"prompts__pick__second_stage": "equal", "train__iterations": 1, "eval__prompts": 1, "eval__save": 0}
TREE = {"name": "branch", "factor": 2, "splits": [0.25, 0.5]}
EARLY = {"name": "left_to_right", "region": {"block_length": 2}, "eos_early_stop": True}
METHODS = {
    "diffu_grpo": {},
    "dars": {},
    "cj_grpo": {"algorithm__decoder": EARLY},
    "cj_grpo in trees": {
        "algorithm__tree": TREE,
        "algorithm__credit": "nested",
        "algorithm__baseline": "leave_one_out",
        "train__updates": 1,
        "train__split": "samples",
    },
    "cj_grpo by gains": {"algorithm__decoder": EARLY, "algorithm__credit": "step_gain"},
    "co_grpo": {},
    "just_grpo of unequal answers": {"train__semantic_entropy": 0.5, "algorithm__objective": "contrast"},
}


@pytest.fixture
def watched(monkeypatch):
    """The groups of all second stages, in the order of iterations."""
    seen, real = [], RunState.second_stage
    monkeypatch.setattr(RunState, "second_stage", lambda *told: seen.append(real(*told)) or seen[-1])
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_two_stages_train_as_one_rollout_of_all_answers_does(settings, monkeypatch, watched, method):
    """Answers that are written later are as those that are written at once, up to the cut into calls."""
    chosen = {**STAGED, "algorithm__preset": method.partition(" ")[0], **METHODS[method]}
    staged = run.train_config(settings(run__name="staged", **chosen)).folder
    (groups,) = watched
    assert sum(groups.roots) > sum(groups.first)
    assert len({*groups.roots}) > 1
    monkeypatch.setattr(RunState, "groups", lambda self, iteration: replace(groups, first=None))
    whole = run.train_config(settings(run__name="whole", **chosen | {"prompts__pick__second_stage": None})).folder
    (line,), (expected,) = metrics(staged), metrics(whole)
    others = runs.weights(whole, 1)
    for name, tensor in runs.weights(staged, 1).items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=2e-5)
    for key in ("policy/grad_norm", "groups/teaching", "groups/zero_std_fraction"):
        assert line[key] == pytest.approx(expected[key], rel=1e-3)
    for key in ("cost/rollout_evaluations", "cost/update_evaluations", "cost/decoded"):
        assert line[key] == expected[key]
    leaves = 4 if "trees" in method else 1
    assert line["prompts/second_stage"] == leaves * (sum(groups.roots) - sum(groups.first))
    assert "prompts/second_stage" not in expected


def test_the_statistics_are_of_the_first_answers(settings, watched):
    staged = run.train_config(settings(run__name="staged", **STAGED)).folder
    plain = run.train_config(settings(run__name="plain", **STAGED | {"prompts__pick__second_stage": None})).folder
    (line,), (expected,) = metrics(staged), metrics(plain)
    for key in ("reward/mean", "reward/std", "reward/vowels/mean"):
        assert line[key] == expected[key]
    assert line["policy/grad_norm"] != expected["policy/grad_norm"]
    assert line["cost/decoded"] == sum(watched[0].roots) > expected["cost/decoded"] == 32


def test_a_resumed_run_is_the_run_that_was_never_stopped(settings):
    chosen = {**STAGED, "train__iterations": 2, "algorithm__preset": "co_grpo"}
    whole = run.train_config(settings(run__name="whole", **chosen)).folder
    after_first_step(whole.parent, "whole", "parts")
    rest = run.train_config(settings(run__name="parts", run__resume=True, **chosen)).folder
    one, other = runs.weights(whole, 2), runs.weights(rest, 2)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert metrics(rest)[-1]["prompts/second_stage"] > 0


def test_kept_texts_are_of_both_stages(settings, watched):
    done = run.train_config(settings(**STAGED, run__trees={"prompts": 4}, algorithm__preset="cj_grpo"))
    kept = TreeFolder(done.folder).read()
    ends = [sum(not node.estimated for node in tree.nodes) for tree in kept]
    assert ends == watched[0].roots


def test_the_preset_brings_its_second_stage_along_unless_the_config_has_one(settings):
    pick = settings(algorithm__preset="dars").prompts.pick
    assert (pick.second_stage.form, pick.second_stage.most) == ("equal", 4.0)
    other = settings(
        algorithm__preset="dars", prompts__pick={"by": "variance", "second_stage": "hardness"}
    ).prompts.pick
    assert (other.by, other.second_stage.form) == ("variance", "hardness")
    assert (
        settings(algorithm__preset="dars", prompts__pick={"by": "variance"}).prompts.pick.second_stage.form == "equal"
    )
    assert settings(algorithm__preset="dars", prompts__pick__second_stage=None).prompts.pick.second_stage is None
    assert settings(algorithm__preset="diffu_grpo").prompts.pick.second_stage is None


def test_the_plan_says_the_most_that_it_costs(settings, tmp_path):
    """4 groups of 8 become groups of 32; where no answer earns anything, the run takes as many evaluations."""
    (tmp_path / "none.py").write_text("def never(texts, prompts):\n    return [0.0] * len(texts)\n")
    chosen = {**STAGED, "algorithm__preset": "cj_grpo", "run__patience": None, "train__group_size": 8}
    never = settings(rewards=[f"{tmp_path / 'none.py'}:never"], **chosen)
    planned = plan(never)
    assert planned["second_stage"]["decoded"] == 96
    (line,) = metrics(run.train_config(never).folder)
    assert line["prompts/second_stage"] == 96
    most, first = planned["second_stage"]["model_evaluations"], planned["model_evaluations"]
    assert line["cost/rollout_evaluations"] == first["rollout"] + most["rollout"]
    assert line["cost/update_evaluations"] <= first["update"] + most["update"]
    text = f"at most 96 samples more, with {most['rollout']} rollout + {most['update']} update evaluations, if all fail"
    assert ("second stage", text) in table(planned)
    assert "second stage" not in dict(table(plan(settings(algorithm__preset="cj_grpo"))))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"run__engine": {"url": "http://localhost:1"}}, "run.engine, since an engine reports on one rollout"),
        ({"algorithm__preset": "igpo"}, "algorithm.hints=inpainting, since both help groups that fail"),
        (
            {"algorithm__objective": "one_token", "algorithm__likelihood": "monte_carlo"},
            "algorithm.objective=one_token, since it learns from solutions, not samples",
        ),
        ({"run__processes": 2, "run__generators": 1}, "run.generators=1, since a generator knows"),
        ({"rewards": "own"}, "rewards: own compares the samples of a group, which come in two stages"),
    ],
)
def test_what_does_not_go_with_a_second_stage_is_refused(settings, tmp_path, overrides, sentence):
    if "rewards" in overrides:
        overrides = {"rewards": [{"use": f"{tmp_path / 'mine.py'}:own"}]}
    with pytest.raises(InputError, match=sentence):
        run.train_config(settings(**{**STAGED, **overrides}))
    if "rewards" in overrides:
        with pytest.raises(InputError, match=sentence):
            plan(config.validate(settings(**{**STAGED, **overrides}).model_dump(mode="json")))
