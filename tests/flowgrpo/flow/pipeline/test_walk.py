"""A pipeline gives the same in slices of its schedule as in one run."""

import pytest
import tiny
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.walk import Walk

ROWS = [Row("a red circle", 3), Row("a green circle", 4)]


@pytest.mark.parametrize("name", tiny.PIPELINES)
@torch.no_grad()
def test_slices_of_any_length_add_up_to_the_whole_run(name):
    walk = Walk(tiny.PIPELINES[name](), tiny.CALLS[name])
    whole = walk.generate(ROWS)
    state = walk.start(ROWS)
    for steps in (range(1), range(1, len(walk.sigmas) - 1)):
        state = (walk.run_slice(ROWS, steps, state)[1][-1].next_sample,)
    assert torch.equal(walk.decode(state, ROWS, by_landing=False), whole)
    assert torch.equal(walk.decode(state, ROWS, by_landing=True), whole)


@torch.no_grad()
def test_only_steps_that_are_not_for_decoding_or_finding_out_are_counted():
    walk = Walk(tiny.sd3(), tiny.CALLS["sd3"])
    state = walk.start(ROWS)
    assert walk.evaluations == 0
    walk.velocity(state, walk.sigmas[1], ROWS)
    assert walk.evaluations == 2
    walk.decode(state, ROWS, by_landing=True)
    with walk.uncounted():
        walk.velocity(state, walk.sigmas[1], ROWS)
    assert walk.evaluations == 2
