from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from flowgrpo import config
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_budget import (
    GIB,
    ROLLOUT,
    UPDATE,
    Budget,
    Phase,
    advised,
    fitted,
    learnt,
    lines,
    relief,
    rewards_of,
    step,
)
from flowgrpo.training.weights.optimizers import MESSAGE


def each_row(size):
    return Peaks(((0, size * GIB),))


@dataclass(frozen=True)
class Made(Budget):
    """A run of 10 GiB of weights; a row of an update takes 8 GiB, 2 with checkpointing, and a base in int8 half."""

    set: tuple = ()
    micro_batch: int = 4
    rollout_batch: int | None = None
    encode: int = 6
    of_node: int = 8

    @property
    def config(self):
        train = {"micro_batch": self.micro_batch, "rollout_batch": self.rollout_batch}
        train |= {"found": (), "ema": None, "optimizer": SimpleNamespace(name="adamw8bit")}
        dtype = "bfloat16" if "model.dtype" in self.set else "float32"
        return SimpleNamespace(train=SimpleNamespace(**train), model=SimpleNamespace(dtype=dtype, lora=object()))

    def phases(self):
        size = 5 if "model.quantise" in self.set else 10
        weights = {"weights": (size - 4 * ("model.dtype" in self.set)) * GIB}
        each = 2 if "model.gradient_checkpointing" in self.set else 8
        return [
            Phase(name="encode", rows=1, key=None, fixed={"weights": self.encode * GIB}, calls=each_row(1)),
            Phase(
                name="rollout",
                rows=self.rollout_batch or self.micro_batch,
                key=ROLLOUT,
                fixed=weights,
                calls=each_row(1),
            ),
            Phase(
                name="update",
                rows=self.micro_batch,
                key=UPDATE,
                fixed=weights | {"gradients": GIB},
                calls=each_row(each),
            ),
        ]

    def switches(self):
        every = [("model.vae", "offload"), ("model.gradient_checkpointing", True), ("model.quantise", "int8")]
        return [(key, value) for key, value in every if key not in self.set]

    def switched(self, key, value):
        return replace(self, set=(*self.set, key))


@pytest.mark.parametrize("room", [9 * GIB, 14 * GIB, 25 * GIB, 80 * GIB, 80 * GIB + 1])
def test_the_largest_batch_fits_and_one_more_does_not(room):
    for phase in Made().phases():
        rows = phase.largest(room)
        assert rows == 0 or replace(phase, rows=rows).total <= room
        assert replace(phase, rows=rows + 1).total > room


def test_a_smaller_batch_is_advised_before_any_switch():
    settings, after = advised(Made(), 40 * GIB)  # 10 + 1 and 3 rows of 8
    assert settings == {UPDATE: 3, ROLLOUT: 4}  # which would follow it otherwise
    assert after.peak(settings) <= 40 * GIB


def test_a_switch_is_advised_where_one_row_does_not_fit_and_not_one_that_spares_nothing():
    settings, after = advised(Made(), 18 * GIB)
    assert settings == {"model.gradient_checkpointing": True, UPDATE: 2, ROLLOUT: 4}
    assert after.peak(settings) <= 18 * GIB


def test_switches_come_together_where_one_is_too_few():
    settings, after = advised(Made(), 10 * GIB)
    assert set(settings) >= {"model.gradient_checkpointing", "model.quantise"}
    assert after.peak(settings) <= 10 * GIB


def test_what_no_setting_helps_says_so():
    assert advised(Made(), 7 * GIB) is None
    found = fitted(Made(), 7 * GIB, [])
    assert found["set"] is None
    assert not found["fits"]
    assert "does not fit 7.0 GiB, whatever is set" in "\n".join(lines(found))


def test_what_changes_the_learning_is_advised_when_no_switch_is_enough():
    made = Made(encode=1)
    assert advised(made, 9 * GIB)[0] == {
        "model.gradient_checkpointing": True,
        "model.quantise": "int8",
        "model.dtype": "bfloat16",
        ROLLOUT: 4,
        UPDATE: 2,
    }


def test_a_setting_that_later_ones_make_needless_is_not_advised():
    spared = {"model.vae": 1, "model.text_encoders": 3, "model.quantise": 3}

    @dataclass(frozen=True)
    class Three(Made):
        def switches(self):
            return [(key, "set") for key in spared if key not in self.set]

        def phases(self):
            weights = {"weights": (12 - sum(spared[key] for key in self.set)) * GIB}
            return [
                Phase(name=n, rows=1, key=k, fixed=weights, calls=Peaks()) for n, k in (("a", ROLLOUT), ("b", UPDATE))
            ]

    assert set(advised(Three(), 8 * GIB)[0]) == {"model.text_encoders", "model.quantise"}
    assert set(advised(Three(), 7 * GIB)[0]) == set(spared)


def test_bytes_that_are_there_once_are_counted_once():
    calls = Peaks(((6 * GIB, GIB), (0, 2 * GIB)))
    assert [calls.of(rows) // GIB for rows in (1, 4, 8)] == [7, 10, 16]
    phase = Phase(name="update", rows=1, key=UPDATE, fixed={"weights": GIB}, calls=calls)
    for room in (9 * GIB, 12 * GIB, 30 * GIB):
        rows = phase.largest(room)
        assert replace(phase, rows=max(rows, 1)).total <= room or rows == 0
        assert replace(phase, rows=rows + 1).total > room


def test_an_optimizer_step_takes_messages_of_gradients_and_what_is_learned_its_copies():
    def run(**written):
        return config.validated({"model": {"path": "shapes"}, **written})

    two = run(run={"processes": 2})
    assert step(run(), 100, among=1).of(9) == 0
    assert (step(two, 100, among=1).of(1), step(two, MESSAGE, among=1).of(1)) == (800, 2 * MESSAGE)
    assert step(run(model={"path": "shapes", "lora": None}, run={"processes": 2}), 100, among=2).of(1) == 0  # in shards
    assert learnt(run(train={"ema": None}), 100, copies=0, among=1) == {
        "trained": 400,
        "optimizer": 800,
        "gradients": 400,
    }
    assert learnt(run(), 100, copies=1, among=1)["trained"] == 1200


def test_the_weights_of_rewards_are_those_that_their_cards_name():
    def run(*uses: Any):
        written = {"model": {"path": "shapes"}, "rewards": [{"use": use} for use in uses]}
        return rewards_of(config.validated(written))

    assert run("geneval") == (2_000_000_000, [])  # 0.3 GB and 1.7
    assert run("jpeg_size", "./mine.py:reward") == (0, ["./mine.py:reward"])


def test_the_relief_of_a_phase_is_the_switch_by_which_it_takes_the_least():
    """An update of 4 rows: 10 + 1 + 32 GiB; half of them spare 16, checkpointing 24, int8 5."""
    assert relief(Made(), "update") == ("model.gradient_checkpointing", True)
    assert relief(Made(), "update", (UPDATE, "model.quantise")) == (UPDATE, 2)
    assert relief(Made(micro_batch=1), "update", (UPDATE, "model.quantise")) == ("model.quantise", "int8")
    assert relief(Made(), "rollout") == ("model.quantise", "int8")  # 5 of 14, and half the rows 2
    assert relief(Made(), "rollout", ("model.vae",)) is None
    assert relief(Made(), "another") is None


def test_what_changes_the_learning_relieves_only_where_no_switch_does():
    every = ("model.vae", "model.gradient_checkpointing", "model.quantise")
    assert relief(Made(set=every, micro_batch=1), "update") == ("model.dtype", "bfloat16")
