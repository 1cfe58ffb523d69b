"""The benchmark of cheap finishes, at a small size."""

import json
from functools import partial

import pytest


@pytest.fixture
def bench(script, monkeypatch):
    found = script("bench_finish")
    monkeypatch.setattr(found, "settings", partial(found.settings, group_size=6))
    return found


def test_finishes_are_compared_with_exact_ones(bench, tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.json"
    words = ["--preset", "tempflow_fast", "--iterations", "1", "--forms", "2 steps", "int8", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["bench_finish", *words])
    assert bench.main() == 0
    found = json.loads(file.read_text())
    assert list(found) == ["exact", "2 steps", "int8"]
    assert (found["exact"]["agreement"], found["exact"]["drift"], found["exact"]["ratio"]["median"]) == (1, 0, 1)
    assert found["int8"]["evaluations"] == found["exact"]["evaluations"] > found["2 steps"]["evaluations"]
    assert 0 < found["int8"]["drift"] < found["2 steps"]["drift"]
    assert found["int8"]["agreement"] > 0.5
    assert f"| int8 | {found['int8']['seconds']:.3g} |" in capsys.readouterr().out


def test_a_layer_is_measured_in_each_precision(bench, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_finish", "--layer", "8", "64", "32", "--iterations", "1"])
    assert bench.main() == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    errors = {row[0].strip("| "): float(row[-1].strip(" |%")) for row in rows[2:]}
    assert list(errors) == ["float32", "bfloat16", "int8", "fp8"]
    assert errors["float32"] == 0 < errors["bfloat16"] < errors["int8"] < errors["fp8"] < 10
