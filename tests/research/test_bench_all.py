"""What `bench_all.py --compare` says of ratios, and how pairs are made."""

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "research"


def ratio(median, low=None, high=None):
    return {"median": median, "low": low or median, "high": high or median, "pairs": 9}


def test_a_cost_that_rose_and_a_saving_that_fell_are_named(script):
    bench = script("bench_all")
    before = {"a / bare": ratio(1.0), "b / bare": ratio(1.0), "saving of a brush": ratio(1.0), "gone": ratio(1.0)}
    now = {"a / bare": ratio(1.06), "b / bare": ratio(1.04), "saving of a brush": ratio(0.94), "new": ratio(9.0)}
    sure, unsure = bench.worse(before, now)
    assert sure == [
        "a / bare: 1.000 before, 1.060 now, 6% worse",
        "saving of a brush: 1.000 before, 0.940 now, 6% worse",
    ]
    assert unsure == []
    assert bench.worse(now, before | {"saving of a brush": ratio(2.0)}) == ([], [])
    assert bench.worse({"noise": ratio(0.002)}, {"noise": ratio(0.003)}) == ([], [])


def test_a_change_within_the_quartiles_is_unsure(script):
    bench = script("bench_all")
    before = {"a / bare": ratio(1.0), "saving of a brush": ratio(1.0)}
    now = {"a / bare": ratio(1.2, 0.99, 1.3), "saving of a brush": ratio(0.8, 0.7, 1.01)}
    sure, unsure = bench.worse(before, now)
    assert not sure
    assert len(unsure) == 2


@pytest.mark.parametrize("option", ["--compare", "--json"])
def test_a_file_without_ratios_is_refused_before_anything_is_measured(script, tmp_path, monkeypatch, capsys, option):
    (tmp_path / "old.json").write_text("{}")
    bench = script("bench_all")
    monkeypatch.setattr(bench, "measured", lambda *_: pytest.fail("it was"))
    monkeypatch.setattr(sys, "argv", ["bench_all.py", option, str(tmp_path / "old.json")])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 2
    assert "old.json holds no ratios" in capsys.readouterr().err


def test_what_is_measured_takes_the_place_of_what_a_file_holds_of_it(script, tmp_path, monkeypatch, capsys):
    """And is compared with what it held before."""
    bench, path = script("bench_all"), tmp_path / "ratios.json"
    path.write_text(json.dumps({"ratios": {"a / bare": ratio(1.0), "b / bare": ratio(1.0)}}))
    monkeypatch.setattr(
        bench, "measured", lambda name, rounds: {"a / bare": ratio(2.0), f"{name}, {rounds}": ratio(3.0)}
    )
    monkeypatch.setattr(
        sys, "argv", ["bench_all.py", "--only", "run", "--rounds", "4", "--json", str(path), "--compare", str(path)]
    )
    assert bench.main() == 1
    said = capsys.readouterr().out
    assert "worse: a / bare: 1.000 before, 2.000 now, 100% worse" in said
    assert "not measured: b / bare" in said
    now = json.loads(path.read_text())["ratios"]
    assert {name: own["median"] for name, own in now.items()} == {"a / bare": 2.0, "b / bare": 1.0, "run, 4": 3.0}


def test_what_was_measured_before_a_script_ended_is_told_and_kept(script, tmp_path, monkeypatch, capsys):
    bench, path = script("bench_all"), tmp_path / "ratios.json"

    def run(command, **_):
        assert "--json" in command
        if "bench_flow.py" in command[1]:
            Path(command[command.index("--json") + 1]).write_text(json.dumps({"ratios": {"a / bare": ratio(1.0)}}))
            raise KeyboardInterrupt
        pytest.fail("another script began")

    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench_all.py", "--json", str(path)])
    assert bench.main() == 1
    said = capsys.readouterr().out
    assert "| a / bare | 1.000 |" in said
    assert "bench_flow.py ended after 1 ratios" in said
    assert json.loads(path.read_text())["ratios"] == {"a / bare": ratio(1.0)}


def test_a_script_that_fails_has_kept_what_it_measured(script, tmp_path, monkeypatch):
    bench, path = script("bench_run"), tmp_path / "ratios.json"
    monkeypatch.chdir(tmp_path)  # it goes elsewhere
    parts = {"first": lambda rounds: {"a / bare": ratio(1.0)}, "second": lambda rounds: 1 / 0}
    monkeypatch.setattr(bench, "PARTS", parts)
    with pytest.raises(ZeroDivisionError):
        bench.main(["--json", str(path)])
    assert json.loads(path.read_text())["ratios"] == {"a / bare": ratio(1.0)}


def test_pairs_are_ratios_of_one_round(script, monkeypatch):
    paired = script("paired")
    assert paired.paired([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == {"median": 2.0, "low": 1.5, "high": 2.5, "pairs": 3}
    order = []
    works = {name: (lambda name=name: order.append(name)) for name in "ab"}
    taken = paired.in_turns(works, 2)
    assert order == ["b", "a", "a", "b", "b", "a"]  # the first round is not counted
    assert {name: len(own) for name, own in taken.items()} == {"a": 2, "b": 2}
    order.clear()
    prepared = paired.Prepared(lambda: order.append("made") or works["a"])
    paired.in_turns({"a": prepared}, 1, clock=lambda work: order.append("clock") or work())
    assert order == ["made", "clock", "a"] * 2  # what prepares does not count


def test_the_committed_ratios_can_be_compared_with(script):
    """Those of the page are what this script reads, and have the names that the scripts give."""
    committed = json.loads((SCRIPTS.parent / "docs/research/benchmarks.json").read_text())
    assert script("bench_all").worse(committed["ratios"], committed["ratios"]) == ([], [])
    names = committed["ratios"]
    for kind in script("flow_sizes").KINDS:
        for rows in (8, 32):
            assert f"shapes, {rows} rows: rollout of a {kind} / transformer in it" in names
