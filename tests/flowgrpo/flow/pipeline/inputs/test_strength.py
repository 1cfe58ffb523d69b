"""A pipeline that begins from a noised picture walks the steps that its strength leaves, in slices as in a whole run."""

import pytest
import torch
from zoo import SPECIMENS

from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

FROM_PICTURE = "FluxImg2ImgPipeline"


def walk_of(name, **call):
    return DenoisingLoop(SPECIMENS[name].build(), {**SPECIMENS[name].call, **call})


@torch.no_grad()
@pytest.mark.parametrize(("strength", "left"), [(1.0, 4), (0.6, 3), (0.3, 2)])
def test_the_schedule_is_what_strength_leaves_of_it(strength, left):
    whole, cut = walk_of(FROM_PICTURE, strength=1.0), walk_of(FROM_PICTURE, strength=strength)
    row = SPECIMENS[FROM_PICTURE].rows[0]
    for walk in (whole, cut):
        walk.start([row])
    assert cut.sigmas == whole.sigmas[-left - 1 :]


@torch.no_grad()
def test_slices_of_what_is_left_add_up_to_the_whole_run():
    walk, row = walk_of(FROM_PICTURE), SPECIMENS[FROM_PICTURE].rows[0]
    state = walk.start([row])
    assert len(walk.sigmas) == 4
    for steps in (range(1), range(1, 3)):
        state = (walk.run_slice([row], steps, state)[1][-1].next_sample,)
    assert torch.equal(walk.decode(state, [row], by_landing=False), walk.generate([row]))


@torch.no_grad()
def test_a_sigma_of_ones_own_is_not_cut():
    walk, row = walk_of(FROM_PICTURE, strength=0.3), SPECIMENS[FROM_PICTURE].rows[0]
    state = walk.start([row])
    (own,) = walk.velocity(state, walk.sigmas[0], [row])
    (record,) = walk.run_slice([row], (walk.sigmas[0], 0.0), state)[1]
    assert record.sigma == walk.sigmas[0]
    assert torch.equal(record.velocity, own)


@torch.no_grad()
def test_rows_that_draw_from_each_others_seeds_start_alone_and_then_share_calls():
    specimen = SPECIMENS[FROM_PICTURE]
    policy = DiffusersPolicy(specimen.build(), specimen.call)
    together = policy.start(specimen.rows)
    assert policy.capabilities.starts_alone
    assert policy.capabilities.max_batch is None
    for i, row in enumerate(specimen.rows):
        assert torch.equal(together[0][i : i + 1], policy.start([row])[0])


def test_a_strength_that_leaves_no_step_is_refused_with_a_sentence():
    specimen = SPECIMENS["WanVideoToVideoPipeline"]
    policy = DiffusersPolicy(specimen.build(), {**specimen.call, "strength": 0.1})
    with pytest.raises(InputError, match="strength: 0.1 leaves WanVideoToVideoPipeline no step, raise it"):
        policy.check(specimen.rows[:1])
