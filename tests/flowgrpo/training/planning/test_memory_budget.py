from dataclasses import dataclass
from typing import Any

import pytest

from flowgrpo import config
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_budget import advise, best_relief, check_fit, lines
from flowgrpo.training.planning.memory_phases import GIB, ROLLOUT, UPDATE, Budget, Phase, at_key

SWITCHES = {"model.vae": "offload", "model.gradient_checkpointing": True, "model.quantise": "int8"}


def each_row(size):
    return Peaks(((0, size * GIB),))


@dataclass(frozen=True, kw_only=True)
class Made(Budget):
    """A run of 10 GiB of weights; a row of an update takes 8 GiB, 2 with checkpointing, and a base in int8 half."""

    trial: Any = None
    measure: Any = lambda other: None
    encode: int = 6
    unavailable = ()

    def phases(self):
        model, train = self.config.model, self.config.train
        size = (5 if model.quantise else 10) - 4 * (model.dtype == "bfloat16")
        weights, trained = {"weights": size * GIB}, {"weights": size * GIB, "gradients": GIB}
        update = each_row(2 if model.gradient_checkpointing else 8)
        return [
            Phase(name="encode", rows=1, key=None, fixed={"weights": self.encode * GIB}, calls=each_row(1)),
            Phase(name="rollout", rows=train.rollout_rows, key=ROLLOUT, fixed=weights, calls=each_row(1)),
            Phase(name="update", rows=train.micro_batch, key=UPDATE, fixed=trained, calls=update),
        ]

    def loading_bytes(self):
        return 10 * GIB

    def switches(self):
        return [(key, value) for key, value in SWITCHES.items() if at_key(self.config, key) != value]


def made(kind=Made, *, micro_batch=4, rollout_batch=None, encode=6):
    train = {"micro_batch": micro_batch, "rollout_batch": rollout_batch, "ema": None, "optimizer": "adamw8bit"}
    return kind(config=config.validate({"model": {"path": "shapes"}, "train": train}), encode=encode)


@pytest.mark.parametrize(
    ("room", "settings"),
    [
        (40, {UPDATE: 3}),  # 10 + 1 and 3 rows of 8, without a switch
        (18, {"model.gradient_checkpointing": True, UPDATE: 2}),  # where no row fits, and not what spares nothing
    ],
)
def test_a_smaller_batch_is_advised_before_a_switch(room, settings):
    found, after = advise(made(), room * GIB)
    assert found == settings
    assert after.peak(settings) <= room * GIB


@pytest.mark.parametrize(
    ("rollout_batch", "settings"), [(4, {UPDATE: 3, ROLLOUT: 3}), (5, {UPDATE: 3}), (50, {UPDATE: 3, ROLLOUT: 27})]
)
def test_equal_batches_stay_equal(rollout_batch, settings):
    """Equal sizes round alike; a rollout whose rows are its own is made smaller only where it must."""
    found, after = advise(made(rollout_batch=rollout_batch), 40 * GIB)
    assert found == settings
    assert after.peak() <= 40 * GIB


def test_switches_come_together_where_one_is_too_few():
    settings, after = advise(made(), 10 * GIB)
    assert set(settings) >= {"model.gradient_checkpointing", "model.quantise"}
    assert after.peak(settings) <= 10 * GIB


def test_what_no_setting_helps_says_so():
    found = check_fit(made(), 7 * GIB)
    assert found["set"] is None
    assert not found["fits"]
    written = "\n".join(lines(found))
    settings = "model.gradient_checkpointing=true model.quantise=int8 model.dtype=bfloat16"
    assert f"was tried: with {settings}, the phase encode takes 8.3 at least; take a larger GPU\n" in written
    assert "with model.gradient_checkpointing=true: a peak of 20.9; not enough alone" in written
    assert "model.vae" not in written, "it changes neither the peak nor the batches that fit"
    assert "up to 0" not in written


def test_what_changes_the_learning_is_advised_when_no_switch_is_enough():
    needed = {"model.gradient_checkpointing": True, "model.quantise": "int8", "model.dtype": "bfloat16"}
    assert advise(made(encode=1), 9 * GIB)[0] == {**needed, UPDATE: 2}


def test_a_setting_that_later_ones_make_needless_is_not_advised():
    spared = {"model.vae": 1, "model.text_encoders": 3, "model.quantise": 3}

    class Three(Made):
        def switches(self):
            return [(key, "set") for key in spared if at_key(self.config, key) != "set"]

        def phases(self):
            left = self.switches()
            weights = {"weights": (12 - sum(size for key, size in spared.items() if (key, "set") not in left)) * GIB}
            return [
                Phase(name=n, rows=1, key=k, fixed=weights, calls=Peaks()) for n, k in (("a", ROLLOUT), ("b", UPDATE))
            ]

    assert set(advise(made(Three), 8 * GIB)[0]) == {"model.text_encoders", "model.quantise"}
    assert set(advise(made(Three), 7 * GIB)[0]) == set(spared)


@pytest.mark.parametrize(
    ("micro_batch", "phase", "prefixes", "expected"),
    [  # an update of 4 rows: 10 + 1 + 32 GiB; half of them spare 16, checkpointing 24, int8 5
        (4, "update", (), ("model.gradient_checkpointing", True)),
        (4, "update", (UPDATE, "model.quantise"), (UPDATE, 2)),
        (1, "update", (UPDATE, "model.quantise"), ("model.quantise", "int8")),
        (4, "rollout", (), ("model.quantise", "int8")),  # 5 of 14, and half the rows 2
        (4, "rollout", (UPDATE, ROLLOUT), (UPDATE, 2)),  # it sets the rows of both
        (4, "rollout", ("model.vae",), None),
        (4, "another", (), None),
    ],
)
def test_the_relief_of_a_phase_is_the_switch_by_which_it_takes_the_least(micro_batch, phase, prefixes, expected):
    assert best_relief(made(micro_batch=micro_batch), phase, prefixes or ("",)) == expected


def test_what_changes_the_learning_relieves_only_where_no_switch_does():
    assert best_relief(made(micro_batch=1).with_settings(SWITCHES), "update") == ("model.dtype", "bfloat16")
