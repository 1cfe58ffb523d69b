"""The schedule of the learning rate beside that of transformers."""

import diffusers.optimization
import pytest
import torch
import transformers

from flowgrpo.schema.schedule import Schedule

THEIRS = {"transformers": transformers.get_scheduler, "diffusers": diffusers.optimization.get_scheduler}


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("written", "library", "asked"),
    [
        ({"name": "constant"}, "transformers", {"name": "constant_with_warmup"}),
        ({"name": "linear"}, "transformers", {"name": "linear"}),
        ({"name": "cosine"}, "transformers", {"name": "cosine"}),
        (
            {"name": "cosine", "floor": 0.1},
            "transformers",
            {"name": "cosine_with_min_lr", "scheduler_specific_kwargs": {"min_lr_rate": 0.1}},
        ),
        ({"name": "constant"}, "diffusers", {"name": "constant_with_warmup"}),
        ({"name": "cosine_with_restarts", "cycles": 3}, "diffusers", {"name": "cosine_with_restarts", "num_cycles": 3}),
        ({"name": "cosine_with_restarts"}, "diffusers", {"name": "cosine_with_restarts"}),
        ({"name": "polynomial", "power": 2.5, "floor": 1e-7}, "diffusers", {"name": "polynomial", "power": 2.5}),
        ({"name": "polynomial", "floor": 1e-7}, "diffusers", {"name": "polynomial"}),
    ],
)
def test_the_rate_of_every_step_is_that_of_a_library(written, library, asked, warmup):
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = THEIRS[library](optimizer=dummy, num_warmup_steps=warmup, num_training_steps=20, **asked)
    for step in range(20):
        found = Schedule(**written, warmup=warmup).factor(step, 20)
        assert found == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        dummy.step(), theirs.step()


@pytest.mark.parametrize(
    ("key", "value", "name", "taker"), [("cycles", 2, "cosine", "cosine_with"), ("power", 2.0, "linear", "polynomial")]
)
def test_an_option_of_another_word_is_refused(key, value, name, taker):
    with pytest.raises(ValueError, match=f"train.schedule.{key}: {name} has none, take train.schedule.name={taker}"):
        Schedule(name=name, **{key: value})
