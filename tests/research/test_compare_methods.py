"""What the comparison of methods reads out of the metrics of runs; the runs are made up."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from flowgrpo import config
from flowgrpo.flow.planning.plan import plan

spec = importlib.util.spec_from_file_location(
    "compare_methods", Path(__file__).parents[2] / "research" / "compare_methods.py"
)
compare = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


def calibrated(seconds, evaluations):
    return {"phase": "calibration", "time/calibration": seconds, "cost/model_evaluations": evaluations}


def evaluated(reward):
    return {"phase": "eval", "reward/mean": reward, "time/eval": 1e6, "cost/model_evaluations": 10**9}


def trained(seconds, evaluations):
    times = {"time/rollout": 0.25 * seconds, "time/update": 0.75 * seconds, "time/reward": 1e6}
    return {"phase": "train", "reward/mean": 1e6, "cost/model_evaluations": evaluations, **times}


def written(folder, *lines, rate=1e-4):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"model: {{path: shapes}}\ntrain: {{learning_rate: {rate}}}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def budget(seconds):
    return compare.Budget(seconds, compare.trained_seconds, "seconds")


ITERATION = trained(20.0, 100)
RUN = [  # at 10, 50 and 90 seconds, and after 500, 700 and 900 evaluations
    *(calibrated(10.0, 500), evaluated(0.2)),
    *(ITERATION, ITERATION, evaluated(0.4)),
    *(ITERATION, ITERATION, evaluated(0.5)),
    ITERATION,
]


def test_rollouts_updates_and_calibrations_cost_and_nothing_else():
    assert compare.trained_seconds(RUN) == 10 + 5 * 20
    assert compare.evaluations(RUN) == 500 + 5 * 100
    assert compare.trained_seconds([]) == compare.evaluations([]) == 0


def test_a_curve_has_a_point_at_each_evaluation_and_begins_before_the_calibration():
    assert compare.curve(RUN, compare.trained_seconds) == [(0, 0.2), (10, 0.2), (50, 0.4), (90, 0.5)]
    assert compare.curve(RUN, compare.evaluations) == [(0, 0.2), (500, 0.2), (700, 0.4), (900, 0.5)]


@pytest.mark.parametrize(
    ("seconds", "reward"), [(0, 0.2), (5, 0.2), (10, 0.2), (30, 0.3), (50, 0.4), (70, 0.45), (90, 0.5)]
)
def test_rewards_lie_on_straight_lines_between_evaluations(seconds, reward):
    assert compare.at(compare.curve(RUN, compare.trained_seconds), seconds) == pytest.approx(reward)


def test_a_curve_without_a_calibration_begins_where_training_does():
    points = compare.curve(RUN[1:], compare.trained_seconds)
    assert compare.at(points, 0) == pytest.approx(0.2)


def test_nothing_is_known_of_what_comes_after_the_last_evaluation():
    with pytest.raises(ValueError, match="a run ended at 90, before 91"):
        compare.at(compare.curve(RUN, compare.trained_seconds), 91)


def test_a_run_is_finished_by_an_evaluation_at_its_budget_or_after(tmp_path):
    folder = written(tmp_path / "r", *RUN)
    assert [compare.finished(folder, budget(seconds)) for seconds in (89, 90, 91, 110)] == [True, True, False, False]
    assert not compare.finished(tmp_path / "none", budget(1))
    whole = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(whole[:8]))  # cut off in the line of the last evaluation
    assert [compare.finished(folder, budget(seconds)) for seconds in (50, 51)] == [True, False]


@pytest.fixture
def two_folders(tmp_path):
    """Two seeds of `calm` in two folders, one seed of `two-part` with a calibration, and a run that has just begun."""
    step = trained(50.0, 100_000)
    written(tmp_path / "a" / "calm-seed0", evaluated(0.2), step, evaluated(0.4), step, evaluated(0.6), step)
    written(tmp_path / "b" / "calm-seed1", evaluated(0.3), step, evaluated(0.5), step, evaluated(0.9), rate=3e-5)
    slow = trained(90.0, 100_000)
    start = calibrated(10.0, 500_000), evaluated(0.1)
    written(tmp_path / "a" / "two-part-seed0", *start, slow, evaluated(0.3), slow, evaluated(0.5))
    written(tmp_path / "a" / "begun-seed0", evaluated(0.2), step)
    (tmp_path / "a" / "calm-seed0.log").write_text("step 1\n")
    return [tmp_path / "a", tmp_path / "b"]


def test_a_report_has_a_row_for_each_method_best_first(two_folders, capsys):
    compare.report(two_folders, budget(80.0))
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| method | learning rate | seeds | before | after 80 s | gain | after 200k evaluations |")
    # calm at 80 s: 0.4 + 0.2 * 30 / 50 and 0.5 + 0.4 * 30 / 50, whose standard error is half their difference
    assert [row.rsplit("|", 3)[0] for row in rows] == [
        "| `calm` | 0.0001, 3e-05 | 2 | 0.250 | 0.630 ± 0.110 | 0.380 ± 0.060 | 0.750 ± 0.150 ",
        "| `two-part` | 0.0001 | 1 | 0.100 | 0.256 ± nan | 0.156 ± nan | 0.100 ± nan ",
    ]


def test_mean_curves_have_the_rewards_between_evaluations_and_their_standard_errors(two_folders):
    found = compare.mean_curves(two_folders, budget(80.0))
    assert list(found["methods"]) == ["calm", "two-part"]
    costs, means, errors = zip(*found["methods"]["calm"], strict=True)
    assert costs == pytest.approx([80 * look / 12 for look in range(13)])
    assert means[0] == pytest.approx(0.25)
    assert means[-1] == pytest.approx(0.63)
    assert errors[-1] == pytest.approx(0.11)


def test_a_budget_of_evaluations_is_reported_alone(two_folders, capsys):
    compare.report(two_folders, compare.Budget(150_000, compare.evaluations, "evaluations"))
    head, _, calm, two_part = capsys.readouterr().out.splitlines()
    assert head == "| method | learning rate | seeds | before | after 150k evaluations | gain | iterations | seconds |"
    # halfway between the first and the second evaluation after the start: (0.5 + 0.7) / 2, and the one iteration that fits
    assert calm == "| `calm` | 0.0001, 3e-05 | 2 | 0.250 | 0.600 ± 0.100 | 0.350 ± 0.050 | 1 | 50 |"
    assert two_part.startswith("| `two-part` | 0.0001 | 1 | 0.100 | 0.100")


def test_a_report_at_more_evaluations_than_some_method_made_says_so(two_folders, capsys):
    compare.report(two_folders, budget(80.0), work=550_000.0)
    head, _, calm, two_part = capsys.readouterr().out.splitlines()
    assert "after 550k evaluations" in head
    assert calm.split(" | ")[6] == "made fewer"
    assert two_part.split(" | ")[6] == "0.200 ± nan"


def test_a_report_tells_what_a_rise_of_the_reward_took(two_folders, capsys):
    compare.report(two_folders, compare.Budget(150_000, compare.evaluations, "evaluations"), rise=0.3)
    head, _, calm, two_part = capsys.readouterr().out.splitlines()
    assert head.endswith("| after 150k evaluations | gain | evaluations to +0.3 | iterations | seconds |")
    assert calm.split(" | ")[6] == "137.5k"  # 150,000 of 0.2, 0.4, 0.6; 125,000 of 0.3, 0.5, 0.9
    assert two_part.split(" | ")[6] == "650.0k"
    compare.report(two_folders, compare.Budget(150_000, compare.evaluations, "evaluations"), rise=0.5)
    _, _, calm, two_part = capsys.readouterr().out.splitlines()
    assert calm.split(" | ")[6] == "175.0k in 1 of 2"
    assert two_part.split(" | ")[6] == "more"


@pytest.mark.parametrize(("preset", "updates"), [("awm_fast", 1), ("flow_grpo", 2), ("branch_grpo", 1)])
def test_a_batch_sets_the_groups_that_it_pays_for(preset, updates):
    (own,) = compare.parsed([preset], ["train.group_size=4", f"train.updates={updates}"]).values()
    cost = plan(config.load(compare.CONFIG, [*compare.settings_of(own, compare.CONFIG), "train.groups=10"]))
    assert compare.groups(own, compare.CONFIG, compare.planned(cost)) == "train.groups=10"
    assert compare.groups(own, compare.CONFIG, 1) == f"train.groups={updates}"


def test_each_method_gets_the_rate_that_came_furthest(capsys):
    rewards = {"a-lr1e-4": 0.5, "a-lr3e-4": 0.6, "b-lr1e-4": 0.3, "b-lr3e-4": 0.2}
    asked = []
    methods = {"a": ["x=1"], "b": []}
    found = compare.with_rates(methods, ["1e-4", "3e-4"], lambda tried: (asked.append(tried), rewards)[1])
    assert found == {"a": ["x=1", "train.learning_rate=3e-4"], "b": ["train.learning_rate=1e-4"]}
    assert asked[0].keys() == rewards.keys()
    assert asked[0]["a-lr1e-4"] == ["x=1", "train.learning_rate=1e-4"]
    assert capsys.readouterr().out.splitlines()[0] == "a-lr3e-4 of 0.500 by 1e-4, 0.600 by 3e-4"
    for name in rewards:
        config.load(compare.CONFIG, [f"run.name={name}-seed7"])  # a name that a run may have


def run_by(monkeypatch, *arguments):
    """The runs that a command line asks for, none of which is run: their folder, name, seed, rate and budget."""
    asked = []

    def train(name, path, overrides, seed, budget, looks, out):
        rate = next((each.partition("=")[2] for each in overrides if "learning_rate" in each), None)
        asked.append((out.name, name, seed, rate, budget.amount))
        return {"1e-4": 0.5, "2e-4": 0.6}.get(rate, 0.0)

    monkeypatch.setattr(compare, "train", train)
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", "run", *map(str, arguments)])
    compare.main()
    return sorted(asked)


def test_the_runs_that_choose_a_rate_have_a_seed_a_folder_and_a_budget_of_their_own(monkeypatch, tmp_path):
    chosen = ["--rates", "1e-4", "2e-4", "--rates-seed", 7, "--seeds", 0, 1]
    shape = [tmp_path / "out", "--methods", "nft", "--work", 8000, *chosen]
    table = [("out", "nft", 0, "2e-4", 8000.0), ("out", "nft", 1, "2e-4", 8000.0)]
    assert run_by(monkeypatch, *shape, "--rates-budget", 4000) == [
        *table,
        ("rates", "nft-lr1e-4", 7, "1e-4", 4000.0),
        ("rates", "nft-lr2e-4", 7, "2e-4", 4000.0),
    ]
    assert {run[-1] for run in run_by(monkeypatch, *shape)} == {8000.0}


def test_a_seed_that_chooses_a_rate_is_none_of_the_table(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_by(monkeypatch, tmp_path / "out", "--methods", "nft", "--rates", "1e-4", "--rates-seed", 1, "--seeds", 0, 1)
    assert "--rates-seed 1: it chooses the rates, take one that is not in --seeds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_method_that_cannot_be_run_is_named_before_any_run(monkeypatch, tmp_path, capsys):
    arguments = ["run", str(tmp_path / "out"), "--settings", "train.group_size=4", "--methods", "awm", "tempflow"]
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert "--methods tempflow: train.group_size: 4 does not divide" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_method_is_a_preset_or_a_name_for_one_with_options():
    assert compare.parsed(["tempflow", "short=tempflow algorithm.tree.finish=2 'algorithm.tree.profile=[6, 6]'"]) == {
        "tempflow": ["algorithm={preset: tempflow}"],
        "short": ["algorithm={preset: tempflow}", "algorithm.tree.finish=2", "algorithm.tree.profile=[6, 6]"],
    }


@pytest.mark.parametrize(
    ("preset", "clip"),
    [("flow_grpo", 1e-3), ("branch_grpo", 1e-3), ("grpo_guard", 2e-5), ("flow_grpo_fast", 1e-4)],
)
def test_a_clip_range_belongs_to_a_form_of_the_ratio(preset, clip):
    chosen = [f"algorithm.preset={preset}", "train.group_size=16"]
    assert compare.clip_range(chosen, compare.CONFIG) == [f"algorithm.objective.clip_range={clip}"]


def test_a_run_has_its_preset_s_clip_range_unless_another_is_asked_for():
    def clip_of(method):
        (overrides,) = compare.parsed([method]).values()
        objective = config.load(compare.CONFIG, compare.settings_of(overrides, compare.CONFIG)).algorithm.objective
        return getattr(objective, "clip_range", None)

    assert clip_of("tempflow_fast") == 1e-3
    assert clip_of("grpo_guard") == 2e-5
    assert clip_of("a=tempflow_fast algorithm.objective.clip_range=5e-4 train.groups=4") == 5e-4
    assert clip_of("a=tempflow_fast algorithm.tree.finish=2") == 1e-3
    assert clip_of("nft") is None


def test_texts_and_gates_have_no_clip_of_flows():
    assert compare.clip_range(["algorithm.preset=gdpo"], compare.CONFIG.with_name("mdlm.yaml")) == []
    gate = ["algorithm.objective={name: soft_gate}", "train.group_size=24"]
    assert compare.clip_range(gate, compare.CONFIG) == []
