"""The benchmark of whole runs: what it starts, and what it tells."""

import json

import pytest


@pytest.fixture
def bench(script):
    return script("bench_run")


def test_a_reward_beside_decoding_is_told(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "GROUPS", 2)
    bench.main(["--only", "rewards", "--rounds", "1", "--json", str(tmp_path / "found.json")])
    ratios = json.loads((tmp_path / "found.json").read_text())["ratios"]
    assert set(ratios) == {
        f"decoding and a reward that {does}: at once / one after the other" for does in ("waits", "computes")
    }
    assert all(0 < each["low"] <= each["median"] <= each["high"] for each in ratios.values())


def test_a_reward_beside_sampling_is_told(bench, monkeypatch):
    monkeypatch.setattr(bench, "GROUPS", 2)
    monkeypatch.setattr(bench, "CHAINS", 1)
    found = bench.sampling(1)
    assert [name.partition(" a call")[0] for name in found] == [f"rollout, {n} of 2 groups" for n in (1, 4)]
    assert all(each["pairs"] == 1 for each in found.values())


def test_an_iteration_is_the_difference_of_two_runs(bench, monkeypatch):
    walls = {(1, 1): [10.0, 12.0], (1, 5): [18.0, 20.0], (2, 1): [11.0, 13.0], (2, 5): [16.0, 17.0]}
    taken = {key: [bench.Spent(wall, 99.0, sum(key)) for wall in each] for key, each in walls.items()}
    monkeypatch.setattr(bench.paired, "in_turns", lambda works, rounds, clock: taken)
    found, memory = bench.processes(2).values()
    assert (found["low"], found["high"], found["pairs"]) == pytest.approx((0.53125, 0.59375, 2))
    assert (memory["median"], memory["pairs"]) == (pytest.approx(7 / 6), 2)


def test_runs_are_those_of_the_command_line(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "command", asked.append)
    bench.trained(2, 5)
    assert asked[0][:4] == ["-m", "flowgrpo", "train", "configs/shapes.yaml"]
    assert {"run.processes=2", "train.iterations=5", "run.trees=null"} <= set(asked[0])


def test_a_process_tells_its_own_seconds_and_memory(bench):
    """Of several in turn each has its own peak, also after a larger one; memory of a process that it starts counts."""
    large = "x = bytearray(200 * 2**20); x[::4096] = bytes(len(x[::4096]))"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {large!r}])"
    least, most, again, other = (bench.command(["-c", code]) for code in ("", large, "", inner))
    assert least.peak < 100 * 2**20
    assert most.peak - least.peak == pytest.approx(200 * 2**20, rel=0.1)
    assert again.peak < 100 * 2**20
    assert other.peak == pytest.approx(most.peak, rel=0.1)
    slow = bench.command(["-c", "import time; time.sleep(0.5)"])
    assert slow.wall > 0.5
    assert 0 < slow.cpu < 0.5


def test_a_command_that_fails_ends_the_measurement(bench):
    with pytest.raises(SystemExit, match="ended with status 3: no"):
        bench.command(["-c", "import sys; sys.stderr.write('no'); sys.exit(3)"])
