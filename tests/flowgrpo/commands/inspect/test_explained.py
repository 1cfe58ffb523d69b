"""`flowgrpo explain` on a run of a tiny pipeline, and what it refuses."""

import json
from pathlib import Path

import pytest
import yaml

from flowgrpo.cli import main


@pytest.fixture
def run(trained):
    return Path("runs/t")


def test_a_sample_of_a_run_is_explained(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    capsys.readouterr()
    asked = ["explain", str(run), "--prompt", "1", "--redraws", "3", "--chains", "5", "--format", "json"]
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    prompts = Path("prompts.txt").read_text().splitlines()
    assert (told["prompt"], told["seed"], told["checkpoint"]) == (prompts[1], 1, 2)
    steps = 3 - 1  # the last one is ODE
    assert [each["step"] for each in told["shares"]] == [*range(steps)]
    assert [len(each["rewards"]) for each in told["redraws"]] == [3] * steps
    assert len({each["advantage"] for each in told["credit"]}) == 1
    assert told["total_variance"] > 0
    assert abs(told["sum"]["share"] - sum(each["share"] for each in told["shares"])) < 1e-9
    assert Path(told["page"]) == run / "explain-0001.html"
    assert "one sample, explained" in Path(told["page"]).read_text()
    changed = [path for path in before if path.is_file() and path.stat().st_mtime_ns != before[path]]
    assert changed == []  # nothing else of the run

    assert main([*asked, "--seed", "8", "--step", "2"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["seed"] == 8
    assert other["reward"] != told["reward"]
    assert Path(other["page"]).name == "explain-0001-seed-8.html"

    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out) == told  # to the last digit

    assert main([*asked[:-2], "--out", "mine.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
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
def test_what_cannot_be_explained_is_one_sentence(run, unloaded, capsys, options, sentence):
    capsys.readouterr()
    assert main(["explain", str(run), *options]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert len(told.strip().splitlines()) == 1


def test_a_folder_without_a_run_and_a_reward_of_groups_are_refused(run, unloaded, capsys):
    assert main(["explain", "nowhere"]) == 2
    assert "there is no run here" in capsys.readouterr().err
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("kind: flow", "kind: mdlm"))
    assert main(["explain", str(run)]) == 2
    Path("together.py").write_text(
        "def together(images, prompts):\n    return [0.0] * len(prompts)\n\n\ntogether.group_wise = True\n"
    )
    config.write_text(config.read_text().replace("kind: mdlm", "kind: flow"))
    written = yaml.safe_load(config.read_text())
    written["rewards"] = [{"use": str(Path("together.py").resolve()) + ":together"}]
    config.write_text(yaml.safe_dump(written))
    capsys.readouterr()
    assert main(["explain", str(run)]) == 2
    assert "compares the samples of a group" in capsys.readouterr().err
