"""The soak, in short, and what its script says of a failure."""

import importlib.util
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from soaking import cases, runner, state
from soaking.subjects import SUBJECTS

spec = importlib.util.spec_from_file_location("soak", Path(__file__).parents[2] / "scripts" / "soak.py")
soak = importlib.util.module_from_spec(spec)
spec.loader.exec_module(soak)


@pytest.mark.parametrize("subject", [SUBJECTS[0], pytest.param(SUBJECTS[11], marks=pytest.mark.zoo)])
def test_runs_that_are_killed_and_damaged_come_to_what_others_come_to(subject, tmp_path):
    total = Counter()
    for case in runner.cases(5, tmp_path, numbers=iter(range(20)), subjects=[subject], kills=3):
        assert case.failure is None, case.steps
        total += runner.counted(case)
        if total["kills"] and total["damages"]:  # they fall by the clock
            break
    assert total["exact recoveries"] == total["cases"]
    assert total["kills"] > 0
    assert total["damages"] > 0


def test_presets_kinds_processes_and_shardings_are_all_there():
    assert {subject.config for subject in SUBJECTS} == {"tiny", "shapes", "text"}
    assert {subject.preset for subject in SUBJECTS} > {"flow_grpo", "branch_grpo", "tempflow_fast", "coupled_grpo"}
    assert {(subject.processes, subject.sharding) for subject in SUBJECTS} == {(1, "none"), (2, "none"), (2, "fsdp2")}


def test_a_failure_is_told_with_its_seed_and_steps_and_is_status_1(monkeypatch, capsys):
    def fails(seed, number, subject, place, **options):
        case = cases.Case(number, subject, steps=["kill one by time"], counts=Counter({"kill one": 1}))
        case.failure = "weights differ" if number == 1 else None
        return case

    monkeypatch.setattr(runner, "soak", fails)
    monkeypatch.setattr(runner, "undisturbed", lambda subject, place, name: ({}, 1.0))
    assert soak.main(["--seed", "7", "--cases", "3"]) == 1
    told = capsys.readouterr().out
    assert "case 1 of seed 7, tiny, flow_grpo, LoRA, 2 x fsdp2: weights differ\n  1. kill one by time\n" in told
    assert "again: python scripts/soak.py --seed 7 --only 1" in told
    assert "| all | 3 | 3 | 0 | 0 | 0 | 1 |" in told
    assert soak.main(["--seed", "7", "--only", "2"]) == 0


def test_the_last_bit_of_anything_is_a_difference():
    one = {"weights": {"a": torch.zeros(2)}, "metrics": [{"step": 1, "reward": 0.5}], "random": (1, [2, None])}
    assert state.difference(one, {**one, "weights": {"a": torch.zeros(2)}}) is None
    assert state.difference(one, {**one, "weights": {"a": torch.tensor([0.0, 1e-45])}}) == "/weights/a: tensors differ"
    assert state.difference(one, {**one, "metrics": [{"step": 1, "reward": 0.5 + 2**-53}]}) == (
        "/metrics/0/reward: 0.5 and 0.5000000000000001"
    )
    assert state.difference(one, {**one, "metrics": []}) == "/metrics: 1 and 0 long"
    assert state.difference(one, {**one, "random": (1, [2, 3])}) == "/random/1/1: NoneType and int"
    assert state.difference(one, {key: one[key] for key in ("weights", "metrics")}) == ": keys ['random']"


def test_every_damage_changes_the_checkpoint(tmp_path):
    drawn, kinds = random.Random(0), set()
    for number in itertools.count():
        folder = tmp_path / str(number) / "step-000001"
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(bytes(64) if number % 2 else bytes(range(64)))
        before = state.content(folder)
        name, words = state.damage(folder.parent, drawn)
        assert name == "step-000001"
        assert state.content(folder) != before
        kinds.add(words.split()[0])
        if number == 60:
            break
    assert kinds == set(state.KINDS)
