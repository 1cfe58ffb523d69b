import importlib.util
import sys
from pathlib import Path

import pytest

from flowgrpo import config
from flowgrpo.flow.planning.memory_budget import FlowBudget
from flowgrpo.flow.planning.memory_trace import Sampling, Trial
from flowgrpo.flow.updates.rollout_graphs import Kept
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.iteration_cost import Calls, Work

SCRIPTS = Path(__file__).parents[2] / "research"
GIB = 2**30


def script(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    spec = importlib.util.spec_from_file_location("plan_scale", SCRIPTS / "plan_scale.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def budget(*, full=False):
    nothing = Sampling(
        step=Peaks(),
        operations=0,
        launches=0,
        calls=1,
        widest=0,
        decode=Peaks(),
        decode_tiled=None,
        sample=0,
        decode_operations=0,
    )
    trial = Trial(
        components={"transformer": 40 * GIB},
        shapes={"transformer": {"blocks.0.up.weight": (1024, 1024)}},
        width=2,
        trained=0,
        state=0,
        encode=0,
        embeddings=0,
        held_out_embeddings=0,
        rollout=nothing,
        evaluate=None,
        update=Peaks(((0, GIB),)),
        update_checkpointed=None,
        graph=Kept(once=0, each=0),
        graph_checkpointed=Kept(once=0, each=0),
        dequantises=False,
    )
    settings = config.validate({"model": {"path": "shapes", "dtype": "bfloat16", "lora": None if full else {}}})
    return FlowBudget(
        config=settings,
        trial=trial,
        states=0,
        graphs=(),
        samples=1,
        group=1,
        train_prompts=1,
        held_out=1,
        loads_later=True,
        measure=lambda other: trial,
    )


def test_more_gpus_hold_less_each_down_to_a_machine_or_to_what_none_can_share(monkeypatch):
    found = script(monkeypatch)
    assert found.cells(budget(), found.size) == [
        "44 (update)",
        "7 (update) / 7 (update)",
        "3 (update) / 7 (update)",
        "2 (update) / 7 (update)",
    ]


def test_a_gpu_sends_what_its_calls_gather_whatever_the_number_of_machines_that_hold_the_same(monkeypatch):
    """Two samples in calls of one: 4 steps, then 2 with gradient, whose backward pass gathers again and sums."""
    found = script(monkeypatch)
    calls = {
        "rollout": [Calls(units=2, sweeps=4, rows=1, operations=1, gathers=1)],
        "update": [Calls(units=2, sweeps=2, rows=1, operations=3, gathers=2, sums=1)],
    }
    for full in (False, True):
        work = Work(
            samples=2,
            calls=calls,
            steps=1,
            trees=2,
            numbers=0,
            networks=[{"blocks.0.up.weight": (1024, 2**20)}],
            width=2,
            trained=0,
        )
        said = found.cells(budget(full=full), lambda own, work=work: found.sent(own, work))
        matrix = 2 * 2**30  # bytes
        gathered = (8 + 8) * matrix
        summed = 4 * 2 * matrix if full else 0  # in float32
        assert said[0] == "0.0"
        for cell, processes in zip(said[1:], found.PROCESSES[1:], strict=True):
            flat, within = (float(number) for number in cell.split(" / "))
            assert flat == pytest.approx((gathered + summed) * (1 - 1 / processes) / 1e9, abs=0.06)
            between = 4 * 2 * 2 * matrix / 8 * (1 - 8 / processes) if full else 0  # each sum once more, of an eighth
            assert within == pytest.approx(((gathered + summed) * 7 / 8 + between) / 1e9, abs=0.06)


def test_a_run_that_trains_all_is_that_of_the_built_in_config_without_a_lora(monkeypatch, tmp_path):
    settings = script(monkeypatch).settings_of("flux1-24gb", full=True, folder=tmp_path)
    lora = script(monkeypatch).settings_of("flux1-24gb", full=False, folder=tmp_path)
    assert (settings.model.lora, settings.model.quantise) == (None, None)
    assert lora.model.lora is not None
    assert settings.train.groups == lora.train.groups
    assert settings.model.gradient_checkpointing
