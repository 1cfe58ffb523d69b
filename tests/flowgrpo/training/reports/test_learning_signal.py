"""A run that has nothing to learn says so, and stops."""

import math
import re

import field
import pytest
import torch
import yaml
from field import MANY_DRAWS, closeness, lines, trainer
from runs import background, metrics

from flowgrpo.cli import main
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.training.run.stop_reasons import NothingToLearn

# The reward itself is in the advantage, or nothing of it: not counted as idle.
REWARDED = ("vgpo", "rwr", "gdro", "opd")
# Of the credit, the baseline and the objective of another: not in a plain run.
ALIKE = ("flow_grpo_fast", "flow_grpo_window", "mix_grpo", "dance_grpo", "pref_grpo", "sage_grpo", "elbo_grpo")
ALIKE += ("tempflow_fast", "branch_grpo_mix", "stepwise_flow_grpo", "sol_rl", "awm", "awm_fast", "rvm")


def settings(folder, preset="flow_grpo", **overrides):
    algorithm = {"preset": preset} if isinstance(preset, str) else preset
    usual = {"train__group_size": 12, "eval__every": 9, "run__patience": 2, "run__checkpoint": {"every": 9}}
    return field.settings(folder, algorithm=algorithm, **usual | overrides)


def at_once(reward):
    """A reward that is not tried again."""
    reward.remote = True
    return reward


def log(folder):
    return [line.split(" ", 2)[2] for line in (folder / "r" / "log.txt").read_text().splitlines()]


def test_a_reward_that_dies_stops_the_run_which_goes_on_when_it_is_back(tmp_path):
    alive = [True]

    @at_once
    def mortal(samples, prompts):
        if not alive[0]:
            raise ConnectionError("[/gone] \x1b[2J away\nfor good")
        return closeness(samples, prompts)

    run = trainer(settings(tmp_path), reward=mortal)
    iterate = run.iterate

    def dying():
        alive[0] = run.done < 1
        return iterate()

    run.iterate = dying
    with pytest.raises(NothingToLearn) as stopped:
        run.run()
    why = "nothing to learn, every sample was lost"
    assert str(stopped.value) == f"stopped after step 3: {why.replace(',', ' since step 1,')}"
    place = rf"\S*test_learning_signal\.py:{mortal.__code__.co_firstlineno + 3}"
    said = rf"ConnectionError: \[/gone\] \[2J away for good at {place}"
    lost = rf"the reward 'closeness' failed \({said}\); its 12 samples are dropped"
    told = log(tmp_path)
    further = "the reward 'closeness' failed for 3 more calls; 36 more samples are dropped"
    assert [bool(re.fullmatch(lost, line)) for line in told] == [True, False, False] * 2
    assert told[1:3] + told[4:] == [further, f"step 2: {why}", further, f"step 3: {why}"]
    assert [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()] == ["step-000003"]

    alive[0] = True
    rest = trainer(settings(tmp_path), reward=mortal)
    rest.resume()
    rest.run()
    assert [line["step"] for line in lines(rest)] == [1, 2, 3, 4, 5, 6]
    assert [line["groups/teaching"] for line in lines(rest)] == [4, 0, 0, 4, 4, 4]
    assert log(tmp_path) == told


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([None], "no reward applies to any of its samples"),
        ([math.nan], "every sample was lost"),
        ([0.1], "the rewards of each group are equal"),
        ([math.inf, 0.1], "the rewards of each group are equal, and 4 samples were lost"),
    ],
)
def test_whatever_leaves_nothing_to_learn_is_named(tmp_path, rewards, why):
    """A group has the first of the rewards once, and else the last."""
    constant = lambda samples, prompts: [rewards[0], *rewards[-1:] * (len(prompts) - 1)]  # noqa: E731
    run = trainer(settings(tmp_path), reward=constant, held_out=0)
    with pytest.raises(NothingToLearn, match=f"stopped after step 2: nothing to learn since step 0, {why}$"):
        run.run()
    told = log(tmp_path)
    assert [line for line in told if line.startswith("step")] == [f"step {i}: nothing to learn, {why}" for i in (1, 2)]
    lost = {"every sample was lost": 48, "no reward applies to any of its samples": 0}.get(why, 4 * ("4" in why))
    said = f"the reward 'closeness' returned NaN or infinity for {lost} of 48 samples, which are dropped"
    assert told.count(said) == (2 if lost else 0)  # once an iteration


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=pytest.mark.zoo if name in ALIKE else ()) for name in PRESETS if name not in REWARDED],
)
def test_a_constant_teaches_no_method(tmp_path, preset):
    written = {"preset": preset, "likelihood": {"draws": 2}} if preset in MANY_DRAWS else preset
    chosen = settings(tmp_path, written, train__groups=2, run__patience=1)
    run = trainer(chosen, reward=lambda samples, prompts: [0.1] * len(prompts), held_out=0)
    with pytest.raises(NothingToLearn, match="stopped after step 1"):
        run.run()


def test_an_update_whose_gradient_is_0_learns_nothing(tmp_path):
    """By a teacher that is the student, say."""
    run = trainer(settings(tmp_path), held_out=0)
    for p in run.weights.parameters:
        p.register_hook(torch.zeros_like)
    with pytest.raises(NothingToLearn, match="since step 0, the gradient of every update is 0$"):
        run.run()


def test_a_run_of_one_step_at_rate_0_learns_nothing(tmp_path):
    chosen = settings(tmp_path, train__iterations=1, train__updates=1, train__schedule__warmup=5)
    with pytest.raises(NothingToLearn, match=r"in its only step, its learning rate is 0 \(train.schedule.warmup\)$"):
        trainer(chosen, held_out=0).run()
    longer = settings(tmp_path / "b", train__iterations=2, train__updates=1, train__schedule__warmup=5)
    trainer(longer, held_out=0).run()


@pytest.mark.parametrize(("every", "warned"), [(4, False), (5, True)])
def test_an_average_that_never_moves_is_told(tmp_path, every, warned):
    trainer(settings(tmp_path, train__iterations=2, train__updates=2, train__ema__every=every), held_out=0).run()
    said = f"train.ema.every: the average of the weights, which evaluation, gallery and export use, moves after {every}"
    assert any(line.startswith(said) and line.endswith("take 4 or fewer") for line in log(tmp_path)) == warned


def test_patience_counts_iterations_in_a_row_and_may_have_no_end(tmp_path):
    def now_and_then(run):
        """Only the groups of one prompt differ, and only in every other iteration."""
        return lambda samples, prompts: (
            closeness(samples, prompts) if run.done % 2 and prompts[0] == "a" else [1.0] * len(prompts)
        )

    run = trainer(settings(tmp_path / "a", train__groups=5, train__group_size=4, train__updates=1), held_out=0)
    run.rewards[0] = type(run.rewards[0])("closeness", now_and_then(run))
    run.run()
    assert [line["groups/teaching"] for line in lines(run)] == [0, 1, 0, 1, 0, 1]
    endless = settings(tmp_path / "b", run__patience=None, train__groups=2, train__group_size=4)
    run = trainer(endless, reward=lambda samples, prompts: [1.0] * len(prompts), held_out=0)
    run.run()
    assert [line["groups/teaching"] for line in lines(run)] == [0] * 6
    assert len(log(tmp_path / "b")) == 6


def test_a_run_that_taught_nothing_does_not_end_well_however_short(workplace, capsys):
    (workplace / "mine.py").write_text("def redness(images, prompts):\n    return [1.0] * len(prompts)\n")
    config = workplace / "tiny.yaml"
    rare = {"eval": {"every": 2, "prompts": 1, "save": 0}}
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | rare))
    for options in ([], ["run.resume=true"]):  # which finds nothing left to do
        assert main(["train", "tiny.yaml", *options]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == (
            "ended after step 2: nothing to learn in any of its 2 steps, the rewards of each group are equal; mend that and "
            "begin again with: flowgrpo train tiny.yaml run.name=t-2"
        )


MORTAL = """
from pathlib import Path
def redness(images, prompts):
    if any('"train"' in path.read_text() for path in Path("runs/t").glob("metrics.jsonl")) and Path("dead").exists():
        raise ConnectionError("gone")
    return images[:, 0].mean((1, 2))
"""


def test_the_command_stops_with_status_1_and_says_how_to_go_on(workplace, capsys):
    (workplace / "mine.py").write_text(MORTAL)
    (workplace / "dead").touch()
    options = ["train.iterations=4", "train.groups=1", "train.updates=1"]
    options += ["eval.every=9", "eval.prompts=1", "run.patience=1"]
    assert main(["train", "tiny.yaml", *options, "run.checkpoint.every=9"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "stopped after step 2: nothing to learn since step 1, every sample was lost; a checkpoint is written, "
        f"go on with: flowgrpo train tiny.yaml {' '.join(options)} run.checkpoint.every=9 run.resume=true"
    )
    run = workplace / "runs" / "t"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    failed = "the reward 'redness' failed 3 times (ConnectionError: gone at mine.py:5); its 4"
    assert failed in (run / "log.txt").read_text()
    (workplace / "dead").unlink()
    assert main(["train", "tiny.yaml", *options, "run.resume=true"]) == 0
    assert [line["groups/teaching"] for line in metrics(run)] == [1, 0, 1, 1]


LOSING = """
def redness(images, prompts):
    if prompts[0].endswith('blue circle') or prompts[0].startswith('two'): raise SystemExit(0)
    return [1.0] * len(prompts)
"""


def test_two_processes_stop_together_and_both_tell_the_log(workplace):
    """Two of six groups are lost, in whichever process; the others are equal."""
    (workplace / "mine.py").write_text(LOSING)
    (workplace / "train.txt").write_text("a red circle\na green circle\n" * 2 + "a blue circle\ntwo blue square\n")
    options = ["run.processes=2", "run.patience=1", "eval.save=0", "eval.prompts=1"]
    options += ["train.groups=6", "train.group_size=2", "train.updates=1", "prompts.train=train.txt"]
    process = background("train", "tiny.yaml", *options)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert said.count("stopped after step 1: nothing to learn since step 0") == 1
    assert "Traceback" not in said
    run = workplace / "runs" / "t"
    told = (run / "log.txt").read_text()
    assert told.count("failed 3 times (SystemExit: 0 at mine.py:3); its 2 samples are dropped") == 2
    assert told.count("step 1: nothing to learn, the rewards of each group are equal, and 4 samples were lost") == 1
    assert (run / "checkpoints" / "step-000001").is_dir()
