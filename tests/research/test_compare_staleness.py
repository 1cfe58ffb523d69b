"""What the comparison of stale rollouts trains, and what it reads out of the metrics of runs; the runs are made up."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from flowgrpo import config

SCRIPTS = Path(__file__).parents[2] / "research"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    spec = importlib.util.spec_from_file_location("compare_staleness", SCRIPTS / "compare_staleness.py")
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, found)
    spec.loader.exec_module(found)
    return found


def written(out, name, rewards, stopped=0.0):
    """A run that was evaluated after each of some iterations, with this mean fraction of stopped edges."""
    lines = [{"phase": "eval", "step": step, "reward/mean": reward} for step, reward in rewards.items()]
    lines += [{"phase": "train", "policy/clip_fraction": stopped + gap} for gap in (-0.01, 0.01)]
    (out / name).mkdir(parents=True)
    (out / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_fresh_rollouts_are_trained_on_once_and_stale_ones_by_both_arms(script):
    assert [run.name for run in script.runs([0, 3], [0, 4])] == [
        f"{name}-seed{seed}"
        for seed in (0, 3)
        for name in ("clip-staleness0", "clip-staleness4", "prefix_ratio-staleness4")
    ]


@pytest.mark.parametrize("arm", ["clip", "prefix_ratio"])
def test_an_arm_is_a_run_with_its_objective_and_staleness(script, tmp_path, arm):
    run = script.Run(arm, 4, 2)
    line = script.command(run, tmp_path, 24)
    assert line[1:4] == ["-m", "flowgrpo", "train"]
    chosen = config.load(line[4], line[5:])
    assert (chosen.algorithm.objective.name, chosen.algorithm.kernel.log_prob) == (arm, "sum")
    assert (chosen.run.staleness, chosen.run.seed, chosen.train.iterations) == (4, 2, 24)
    assert (chosen.run.folder, chosen.run.resume) == (tmp_path / run.name, "auto")


def test_the_arms_differ_in_their_objective_alone(script, tmp_path):
    one, other = (script.command(script.Run(arm, 1, 0), tmp_path, 24) for arm in script.ARMS)
    differing = [a.partition("=")[0] for a, b in zip(one, other, strict=True) if a != b]
    assert differing == ["algorithm.objective", "run.name"]
    clip, prefix = (config.load(line[4], line[5:]).algorithm.objective for line in (one, other))
    assert clip.clip_range == prefix.clip_range


def test_a_run_that_came_to_its_last_iteration_is_not_run_again(script, tmp_path, monkeypatch):
    started = []

    class Ended:
        returncode = 0

    def run(line, **options):
        started.append(line)
        written(tmp_path, "clip-staleness1-seed1", {0: 0.4, 24: 0.5})
        return Ended()

    monkeypatch.setattr(script.subprocess, "run", run)
    written(tmp_path, "clip-staleness1-seed0", {0: 0.4, 12: 0.45, 24: 0.5})
    script.train(script.Run("clip", 1, 0), tmp_path, 24)
    assert not started
    script.train(script.Run("clip", 1, 1), tmp_path, 24)
    assert len(started) == 1


def test_a_run_that_fails_is_said_with_the_end_of_its_log(script, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)ended with 2: .*train\.iterations: 0 is wrong"):
        script.train(script.Run("clip", 1, 0), tmp_path, 0)


def test_a_report_compares_the_arms_seed_by_seed(script, tmp_path, capsys):
    for seed, fresh, plain, ours in ((0, 0.6, 0.50, 0.56), (1, 0.7, 0.60, 0.62)):
        written(tmp_path, f"clip-staleness0-seed{seed}", {0: 0.4, 24: fresh})
        written(tmp_path, f"clip-staleness4-seed{seed}", {0: 0.4, 24: plain}, stopped=0.25)
        written(tmp_path, f"prefix_ratio-staleness4-seed{seed}", {0: 0.4, 24: ours}, stopped=0.5)
    written(tmp_path, "clip-staleness4-seed2", {0: 0.4, 24: 0.9})  # its other arm is not done
    written(tmp_path, "prefix_ratio-staleness4-seed2", {0: 0.4, 12: 0.9})
    written(tmp_path, "clip-staleness2-seed0", {0: 0.4, 24: 0.9})
    (tmp_path / "clip-staleness4-seed0.log").write_text("")
    script.report(tmp_path, 24, None)
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| staleness | seeds | before | `clip` | `prefix_ratio` | difference |")
    assert rows == [
        "| 0 | 2 | 0.400 | 0.650 ± 0.050 | 0.650 ± 0.050 | the same | 0.00 | 0.00 |",
        "| 4 | 2 | 0.400 | 0.550 ± 0.050 | 0.590 ± 0.030 | 0.040 ± 0.020 | 0.25 | 0.50 |",
    ]


def test_a_report_of_nothing_says_so(script, tmp_path):
    with pytest.raises(SystemExit, match="has come to iteration 24"):
        script.report(tmp_path, 24, None)
