"""The schedule of the learning rate beside that of transformers."""

import diffusers.optimization
import pytest
import torch
from transformers import get_scheduler

from flowgrpo.schema.schedule import Schedule


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_rate_of_every_step_is_transformers(name, warmup):
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    word = "constant_with_warmup" if name == "constant" else name
    theirs = get_scheduler(word, dummy, warmup, 20)
    for step in range(20):
        assert Schedule(name=name, warmup=warmup).factor(step, 20) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        dummy.step(), theirs.step()


def test_a_floor_is_that_of_transformers():
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler("cosine_with_min_lr", dummy, 3, 20, scheduler_specific_kwargs={"min_lr_rate": 0.1})
    for step in range(20):
        found = Schedule(name="cosine", warmup=3, floor=0.1).factor(step, 20)
        assert found == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        dummy.step(), theirs.step()


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ({"name": "constant"}, {"name": "constant_with_warmup"}),
        ({"name": "cosine_with_restarts", "cycles": 3}, {"name": "cosine_with_restarts", "num_cycles": 3}),
        ({"name": "cosine_with_restarts"}, {"name": "cosine_with_restarts"}),
        ({"name": "polynomial", "power": 2.5, "floor": 1e-7}, {"name": "polynomial", "power": 2.5}),
        ({"name": "polynomial", "floor": 1e-7}, {"name": "polynomial"}),
    ],
)
def test_the_rate_of_every_step_is_that_of_diffusers(written, asked, warmup):
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = diffusers.optimization.get_scheduler(
        optimizer=dummy, num_warmup_steps=warmup, num_training_steps=20, **asked
    )
    for step in range(20):
        found = Schedule(**written, warmup=warmup).factor(step, 20)
        assert found == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        dummy.step(), theirs.step()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            {"name": "cosine", "cycles": 2},
            "train.schedule.cycles: cosine has none, take train.schedule.name=cosine_with",
        ),
        (
            {"name": "linear", "power": 2.0},
            "train.schedule.power: linear has none, take train.schedule.name=polynomial",
        ),
    ],
)
def test_an_option_of_another_word_is_refused(written, said):
    with pytest.raises(ValueError, match=said):
        Schedule(**written)
