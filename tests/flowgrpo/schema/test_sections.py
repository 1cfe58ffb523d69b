"""The schedule of the learning rate beside that of transformers."""

import pytest
import torch
from transformers import get_scheduler

from flowgrpo.schema.sections import Schedule


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
