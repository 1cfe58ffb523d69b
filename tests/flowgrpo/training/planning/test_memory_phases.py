from dataclasses import replace

import pytest

from flowgrpo import config
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_phases import GIB, UPDATE, Phase, step, trained_bytes
from flowgrpo.training.weights.optimizers import MESSAGE


def run(**written):
    return config.validate({"model": {"path": "shapes"}, **written})


CALLS = [Peaks(((0, GIB),)), Peaks(((0, 8 * GIB),)), Peaks(((6 * GIB, GIB), (0, 2 * GIB)))]


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("room", [9 * GIB, 14 * GIB, 25 * GIB, 80 * GIB, 80 * GIB + 1])
def test_the_largest_batch_fits_and_one_more_does_not(room, calls):
    phase = Phase(name="update", rows=1, key=UPDATE, fixed={"weights": 6 * GIB, "gradients": GIB}, calls=calls)
    rows = phase.largest(room)
    assert rows == 0 or replace(phase, rows=rows).total <= room
    assert replace(phase, rows=rows + 1).total > room


def test_bytes_that_are_there_once_are_counted_once():
    assert [CALLS[2].of(rows) // GIB for rows in (1, 4, 8)] == [7, 10, 16]


def test_an_optimizer_step_takes_messages_of_gradients_and_what_is_learned_its_copies():
    two = run(run={"processes": 2})
    assert step(run(), 100, among=1).of(9) == 0
    assert (step(two, 100, among=1).of(1), step(two, MESSAGE, among=1).of(1)) == (800, 2 * MESSAGE)
    assert step(run(model={"path": "shapes", "lora": None}, run={"processes": 2}), 100, among=2).of(1) == 0  # in shards
    learned = trained_bytes(run(train={"ema": None}), 100, copies=0, among=1)
    assert learned == {"trained": 400, "optimizer": 800, "gradients": 400}
    assert trained_bytes(run(), 100, copies=1, among=1)["trained"] == 1200
