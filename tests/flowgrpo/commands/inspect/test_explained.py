"""`flowgrpo explain` on a run of a tiny pipeline, and what it refuses."""

from pathlib import Path

import pytest
import yaml


@pytest.fixture
def run(trained):
    return Path("runs/t")


def test_a_sample_of_a_run_is_explained(run, printed):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    asked, as_json = ["explain", run, "--prompt", "1", "--redraws", "2", "--chains", "3"], ["--format", "json"]
    told = printed(*asked, *as_json)
    prompts = Path("prompts.txt").read_text().splitlines()
    assert (told["prompt"], told["seed"], told["checkpoint"]) == (prompts[1], 1, 2)
    steps = 3 - 1  # the last one is ODE
    assert [each["step"] for each in told["shares"]] == [*range(steps)]
    assert [len(each["rewards"]) for each in told["redraws"]] == [2] * steps
    assert len({each["advantage"] for each in told["credit"]}) == 1
    assert told["total_variance"] > 0
    assert abs(told["sum"]["share"] - sum(each["share"] for each in told["shares"])) < 1e-9
    assert Path(told["page"]) == run / "explain-0001.html"
    assert "one sample, explained" in Path(told["page"]).read_text()
    changed = [path for path in before if path.is_file() and path.stat().st_mtime_ns != before[path]]
    assert changed == []  # nothing else of the run

    other = printed(*asked, "--seed", "8", "--step", "2", *as_json)
    assert other["seed"] == 8
    assert other["reward"] != told["reward"]
    assert Path(other["page"]).name == "explain-0001-seed-8.html"

    assert printed(*asked, *as_json) == told  # to the last digit

    lines = printed(*asked, "--out", "mine.html").splitlines()
    assert lines[0].startswith(("The noise of step ", "No step stands out: "))
    assert lines[-1] == "mine.html"
    assert lines[2].split() == ["step", "decides", "redraws", "advantage"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prompt", "9"], "--prompt: the run has held-out prompts 0 to 3, there is no 9"),
        (["--prompt", "-1"], "--prompt: the run has held-out prompts 0 to 3, there is no -1"),
        (["--step", "7"], "there is no checkpoint of step 7"),
        (["--redraws", "1"], "Invalid value for '--redraws': Input should be greater than or equal to 2"),
        (["--out", "."], "--out: . is there and no ordinary file"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(run, unloaded, refused, options, sentence):
    assert sentence in refused("explain", run, *options)


def test_a_folder_without_a_run_and_a_reward_of_groups_are_refused(run, unloaded, refused):
    assert "there is no run here" in refused("explain", "nowhere")
    config = run / "config.yaml"
    written = config.read_text()
    config.write_text(written.replace("kind: flow", "kind: mdlm"))
    refused("explain", run)
    code = "def together(images, prompts):\n    return [0.0] * len(prompts)\n\n\ntogether.group_wise = True\n"
    Path("together.py").write_text(code)
    rewards = [{"use": str(Path("together.py").resolve()) + ":together"}]
    config.write_text(yaml.safe_dump(yaml.safe_load(written) | {"rewards": rewards}))
    assert "compares the samples of a group" in refused("explain", run)
