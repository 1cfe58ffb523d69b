"""The runs that a page compares: names, letters, curves, and whether their totals mean the same."""

import pytest
from planted import sampled, trained_run

from flowgrpo.commands.compare.runs import find_redefined, have_same_totals, read_runs, unique_names
from flowgrpo.commands.page_parts.history import training_cost
from flowgrpo.errors import InputError

EVALUATED = {0: {"reward/mean": 0.25}, 2: {"reward/mean": 0.5}, 4: {"reward/mean": None}, 6: {"reward/mean": 0.75}}


def use(name, **fields):
    return {"use": f"./mine.py:{name}", "name": None, "weight": 1.0, "offset": 0.0, "options": {}, **fields}


def runs_of(tmp_path, *rewards, **baseline):
    configs = [{"rewards": uses, "algorithm": {"preset": "x", "baseline": baseline}} for uses in rewards]
    return read_runs(
        [trained_run(tmp_path / f"{i}", [], {0: {"reward/mean": 0}}, config=c) for i, c in enumerate(configs)]
    )


def test_a_name_is_as_much_of_a_path_as_tells_it_from_the_others(tmp_path):
    folders = [tmp_path / way for way in ("x/one/a", "y/one/a", "y/two/a", "b")]
    assert unique_names(folders) == ["x/one/a", "y/one/a", "two/a", "b"]
    assert unique_names([tmp_path / "a", tmp_path / "a"])[0] == unique_names([tmp_path / "a", tmp_path / "a"])[1]


def test_letters_and_colours_begin_again(tmp_path):
    folder = sampled(tmp_path / "s", [{"prompt": "a", "shade": 1}])
    runs = read_runs([folder] * 27)
    assert [runs[i].letter for i in (0, 1, 25, 26)] == ["A", "B", "Z", "A2"]
    assert [runs[i].kind for i in (0, 5, 6)] == ["c0", "c5", "c0 dashed"]


def test_a_curve_is_drawn_over_steps_or_over_what_training_had_cost(tmp_path):
    (run,) = read_runs([trained_run(tmp_path / "a", [], EVALUATED)])
    assert run.held_out("", "step") == [(0, 0.25), (2, 0.5), (6, 0.75)]
    assert run.held_out("", "evaluations") == [(0, 0.25), (200, 0.5), (600, 0.75)]
    assert run.held_out("", "seconds") == [(0, 0.25), (5.0, 0.5), (15.0, 0.75)]
    assert run.held_out("r", "step") == []
    assert run.costs == {"evaluations": 600, "seconds": 15.0}


def test_held_out_evaluations_are_no_cost_of_training():
    lines = [
        {"step": 0, "phase": "eval", "cost/model_evaluations": 9000},
        {"step": 1, "phase": "train", "cost/model_evaluations": 7},
        {"step": 2, "phase": "train", "cost/model_evaluations": 5},
    ]
    assert [training_cost(lines, "evaluations", step) for step in (0, 1, 2)] == [0, 7, 12]
    assert training_cost(lines, "evaluations") == 12


def test_totals_compare_where_the_same_rewards_are_added_alike(tmp_path):
    assert have_same_totals(runs_of(tmp_path / "a", [use("r"), use("s")], [use("s"), use("r")]))
    assert not have_same_totals(runs_of(tmp_path / "b", [use("r")], [use("r", weight=2.0)]))
    assert not have_same_totals(runs_of(tmp_path / "c", [use("r")], [use("r", offset=0.5)]))
    assert not have_same_totals(runs_of(tmp_path / "d", [use("r")], [use("s")]))


def test_a_folder_of_samples_counts_the_sum_of_what_they_have(tmp_path):
    lines = [{"prompt": "a", "shade": 1, "rewards": {"r": 0.5}}]
    alone = sampled(tmp_path / "alone", lines)
    weighted = trained_run(tmp_path / "weighted", lines, EVALUATED, config={"rewards": [use("r", weight=3.0)]})
    assert have_same_totals(read_runs([alone, trained_run(tmp_path / "run", lines, EVALUATED)]))
    assert not have_same_totals(read_runs([alone, weighted]))
    unscored = sampled(tmp_path / "unscored", [{"prompt": "a", "shade": 1}])
    assert have_same_totals(read_runs([alone, unscored]))


def test_a_reward_with_other_options_is_another_reward_though_one_run_only_watches_it(tmp_path):
    strict = use("r", options={"strict": True})
    runs = runs_of(tmp_path / "a", [use("r"), use("s")], [strict, use("s")])
    assert have_same_totals(runs)
    assert find_redefined(runs) == ["r"]
    configs = [{"rewards": [use("s"), use("r")]}, {"rewards": [use("s")], "eval_rewards": [strict]}]
    runs = read_runs([trained_run(tmp_path / f"{i}", [], EVALUATED, config=c) for i, c in enumerate(configs)])
    assert find_redefined(runs) == ["r"]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("environment.json", "[]", "environment.json: it holds no object"),
        ("environment.json", "1", "environment.json: it holds no object"),
        ("metrics.jsonl", '{"step": 1, "phase": "train", "reward/mean": 0.5}\n', "metrics.jsonl is not of a run"),
    ],
)
def test_files_that_are_not_of_a_run_are_refused(tmp_path, file, content, said):
    run = trained_run(tmp_path / "a", [], EVALUATED)
    (run / file).write_text(content)
    with pytest.raises(InputError, match=said):
        read_runs([run])


@pytest.mark.parametrize(
    "config", [{"algorithm": {}}, {"algorithm": 3}, {"rewards": [{"use": "r"}]}, {"eval_rewards": [3]}, {"rewards": 3}]
)
def test_a_config_that_is_not_of_a_run_is_refused(tmp_path, config):
    with pytest.raises(InputError, match="is not of a run"):
        read_runs([trained_run(tmp_path / "a", [], EVALUATED, config=config)])
