"""`run.resume: auto` begins a run or goes on with it, so that a queue may give the same command until it ends well."""

import json
import shutil
import time

import pytest
import torch
from runs import background, metrics, wait_for, weights

from flowgrpo.cli import main
from flowgrpo.commands.runs import train as command
from flowgrpo.errors import InputError

AUTO = ["train", "tiny.yaml", "run.resume=auto"]
NO_MORE = (
    "runs/t is finished, with all its 2 iterations; a longer run goes on with: flowgrpo train tiny.yaml "
    "train.iterations=4 run.resume=auto\n"
)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(run, other, step):
    one, two = weights(run, step), weights(other, step)
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def without_times(lines):
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def as_asked(run):
    """The config of a run but for whether it went on."""
    return [line for line in (run / "config.yaml").read_text().splitlines() if "resume:" not in line]


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(None, marks=pytest.mark.zoo),
        pytest.param([], marks=pytest.mark.zoo),
        pytest.param([".lock"], marks=pytest.mark.zoo),
        [".lock", "engine/policy.safetensors", "start.safetensors", "config.yaml.partial"],
    ],
)
def test_auto_begins_what_is_not_there_or_died_before_its_config(workplace, finished, left):
    run = workplace / "runs" / "t"
    for name in left or ():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("4711")  # of a process that is gone
    if left == []:
        run.mkdir(parents=True)
    assert main(AUTO) == 0
    assert same(run, finished / "runs" / "t", 2)
    assert as_asked(run) == as_asked(finished / "runs" / "t")


def test_auto_begins_again_where_the_first_checkpoint_was_never_written(workplace, finished, capfd):
    """The same command, killed in its second iteration, drops what it had and comes to what others come to."""
    later = ["run.checkpoint.every=2", "run.checkpoint.keep=1"]
    run = workplace / "runs" / "t"
    reward = (workplace / "mine.py").read_text()
    (workplace / "mine.py").write_text(reward.replace("    return", "    import time\n    time.sleep(0.1)\n    return"))
    process = background(*AUTO, *later, "train.iterations=40", "run.checkpoint.every=40")
    wait_for(run / "metrics.jsonl", process)
    while not metrics(run) and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    done = len(metrics(run))
    assert done > 0
    (workplace / "mine.py").write_text(reward)
    capfd.readouterr()
    assert main([*AUTO, *later]) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert f"ended before its first checkpoint, whose {done} iterations are dropped and taken again" in said
    whole = finished / "runs" / "t"
    assert same(run, whole, 2)
    assert without_times(metrics(run)) == without_times(metrics(whole))
    files = [json.loads(line)["file"] for line in (run / "samples" / "manifest.jsonl").read_text().splitlines()]
    assert len(files) == len(set(files)) == 3 * 2


def test_auto_goes_on_with_a_run_that_has_only_its_config(trained, finished, capfd):
    run = trained / "runs" / "t"
    for path in run.iterdir():
        if path.name != "config.yaml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(AUTO) == 0
    assert "an earlier attempt ended before its first checkpoint" in " ".join(capfd.readouterr().err.split())
    assert same(run, finished / "runs" / "t", 2)


def test_a_finished_run_says_so_without_its_model_and_nothing_changes(trained, unloaded, monkeypatch, capfd):
    monkeypatch.setattr(command.scorer, "rewards", lambda *uses: pytest.fail("rewards were loaded"))
    before = content(trained / "runs" / "t")
    assert main(AUTO) == 0
    assert capfd.readouterr() == ("", NO_MORE)
    assert main([*AUTO, "train.iterations=1"]) == 0
    said = capfd.readouterr().err
    assert "with all its 1 iterations; a longer run goes on with: " in said
    assert "train.iterations=4 " in said  # twice the steps that it has
    assert content(trained / "runs" / "t") == before


def test_a_finished_run_has_its_policy_for_python(trained):
    done = command.train("tiny.yaml", {"run.resume": "auto"})
    assert [line["step"] for line in done.metrics if line["phase"] == "train"] == [1, 2]
    assert done.policy.modules
    longer = command.train("tiny.yaml", {"run.resume": "auto", "train.iterations": 3})
    assert [line["step"] for line in longer.metrics if line["phase"] == "train"] == [1, 2, 3]


@pytest.mark.parametrize("asked", ["auto", "true"])
def test_what_a_run_is_refused_for_auto_is_refused_for(trained, unloaded, refused, asked):
    (trained / "runs" / "other").mkdir()
    (trained / "runs" / "other" / "holiday.png").touch()
    new = "a resumed run cannot change it, so take another run.name for a new run, or go on with: "
    new += "flowgrpo train runs/t/config.yaml run.resume=true"
    for option, said in (
        ("run.name=other", "runs/other is not the folder of a run, it holds no config.yaml; take another run.name"),
        ("train.learning_rate=0.5", f"train.learning_rate was 0.01 in runs/t and is 0.5 now; {new}"),
        (
            "algorithm.preset=awm",
            f"algorithm.preset was 'flow_grpo' in runs/t and is 'awm' now (and 1 other key); {new}",
        ),
        ("run.seed=5", f"run.seed was 0 in runs/t and is 5 now; {new}"),
    ):
        assert refused("train", "tiny.yaml", f"run.resume={asked}", option) == f"run.resume: {said}"


@pytest.mark.parametrize("left", [None, [".lock"], [".lock", "config.yaml.partial"]])
def test_true_names_auto_where_no_run_has_begun(workplace, unloaded, refused, left):
    for name in left or ():
        (workplace / "runs" / "t").mkdir(parents=True, exist_ok=True)
        (workplace / "runs" / "t" / name).touch()
    assert refused("train", "tiny.yaml", "run.resume=true") == (
        "run.resume: there is no run in runs/t yet; run.resume=auto starts one there, and continues it later"
    )


@pytest.mark.parametrize("asked", ["true", "auto"])
@pytest.mark.parametrize("gone", ["the folder", "its folders", "the last iteration and the folder"])
def test_a_run_that_lost_its_checkpoints_is_refused_and_kept(trained, unloaded, refused, asked, gone):
    run, done = trained / "runs" / "t", 2
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path)
    if gone != "its folders":
        (run / "checkpoints").rmdir()
    if gone == "the last iteration and the folder":
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < 2))
        done = 1
    before = content(run)
    assert refused("train", "tiny.yaml", f"run.resume={asked}") == (
        f"run.resume: runs/t/metrics.jsonl tells of {done} iterations, and no checkpoint is left in "
        "runs/t/checkpoints; put a copy back, or begin again with another run.name"
    )
    assert content(run) == before


def test_a_run_that_ended_badly_is_not_finished(workplace, capsys):
    (workplace / "mine.py").write_text("def redness(images, prompts):\n    return [1.0] * len(prompts)\n")
    for _ in range(2):
        assert main([*AUTO, "train.iterations=1", "eval.save=0", "eval.prompts=1", "train.updates=1"]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("ended after step 1: nothing to learn in its only step, the rewards of each group are")


def test_processes_that_see_different_runs_are_refused(workplace, monkeypatch):
    monkeypatch.setattr(command, "gather_object", lambda own: [*own, not own[0]])
    said = "^run.resume: some processes see a run in runs/t and others see none; look at its"
    with pytest.raises(InputError, match=said):
        command.train("tiny.yaml", {"run.resume": "auto"})
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize(("written", "end"), [("ture", "did you mean 'true'?"), (2, "choose one of false, true, auto")])
def test_another_word_is_refused_with_those_that_there_are(workplace, refused, written, end):
    said = f"run.resume: {written!r} is not allowed, {end}"
    assert refused("train", "tiny.yaml", f"run.resume={written}") == said
