"""The benchmark of a large language model, on a small one."""

import importlib.util
from pathlib import Path

import pytest

place = Path(__file__).parents[2] / "research" / "bench_large_text.py"
spec = importlib.util.spec_from_file_location("bench_large_text", place)
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)

SIZES = {"vocabulary": 64, "hidden": 32, "layers": 2, "heads": 4, "rank": 2, "prompt": 5, "length": 8, "steps": 4}
SIZES |= {"block-length": 4, "group-size": 3, "iterations": 2}


@pytest.mark.parametrize("more", [[], ["--gradient-checkpointing", "--preset", "cj_grpo", "--passes", "2"]])
def test_an_iteration_is_measured(capsys, more):
    bench.main([*(f"--{name}={size}" for name, size in SIZES.items()), *more])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| iteration | peak GiB |")
    cells = [[float(cell) for cell in row.strip("| ").split("|")] for row in rows]
    assert [row[0] for row in cells] == [1, 2]
    assert all(number > 0 for row in cells for number in row)
