"""What a pipeline puts back around a mask is seen by the model, and has no part in what the policy did."""

import logging
from dataclasses import replace

import pytest
import torch
from PIL import Image
from zoo import SPECIMENS

from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

NAME = "FluxInpaintPipeline (from a picture)"
ROW = SPECIMENS[NAME].rows[0]


def started(name=NAME):
    walk = DenoisingLoop(SPECIMENS[name].build(), SPECIMENS[name].call)
    return walk, walk.start(SPECIMENS[name].rows[:1])


@torch.no_grad()
def test_pins_are_seen_where_there_are_some():
    assert started()[0].pins
    assert not started("FluxPipeline")[0].pins
    assert not started("FluxImg2ImgPipeline")[0].pins


@torch.no_grad()
def test_the_velocity_of_the_pinned_part_is_0_and_nothing_depends_on_its_state():
    walk, state = started()
    for sigma in walk.sigmas[1:-1]:
        (velocity,) = walk.velocity(state, sigma, [ROW])
        pinned = velocity == 0
        assert 0.4 < pinned.float().mean() < 0.6  # half of the picture is masked
        other = torch.where(pinned, 5.0, state[0])
        assert torch.equal(walk.velocity((other,), sigma, [ROW])[0], velocity)
        assert not torch.equal(walk.velocity((other + 1,), sigma, [ROW])[0], velocity)


@torch.no_grad()
def test_the_model_sees_what_the_whole_run_puts_back():
    walk, state = started()
    whole = walk.run_slice([ROW], None, record=True)[1]
    for index, expected in enumerate(whole):
        (record,), _ = walk.step([ROW], range(index, index + 1), state)
        assert torch.equal(record.sample, expected.sample)
        assert torch.equal(record.velocity, expected.velocity)
        state = (record.next_sample,)


@torch.no_grad()
def test_a_landing_costs_no_evaluation_once_its_shapes_are_known():
    walk, state = started()
    walk.velocity(state, walk.sigmas[1], [ROW])
    ran, before = [], walk.evaluations
    handle = walk.modules["transformer"].transformer_blocks[0].register_forward_hook(lambda *_: ran.append(1))
    walk.velocity(state, walk.sigmas[2], [ROW])
    handle.remove()
    assert (len(ran), walk.evaluations - before) == (1, 1)


def test_the_pinned_part_has_no_gradient():
    walk, state = started()
    walk.modules["transformer"].requires_grad_(True)
    with torch.no_grad():
        pinned = walk.velocity(state, walk.sigmas[1], [ROW])[0] == 0
    (velocity,) = walk.velocity(state, walk.sigmas[1], [ROW])
    (velocity * pinned).sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in walk.modules["transformer"].parameters())


def test_rows_whose_pins_come_from_each_others_seeds_get_calls_of_their_own():
    policy = DiffusersPolicy(SPECIMENS[NAME].build(), SPECIMENS[NAME].call)
    policy.check(SPECIMENS[NAME].rows)
    assert policy.capabilities.max_batch == 1
    assert policy.capabilities.decodes_by_landing


# Below half of white: every inpainting pipeline takes it for black, which keeps the picture.
RED = Image.new("RGB", (16, 16), (255, 0, 0))


@pytest.mark.parametrize("name", ["FluxControlInpaintPipeline", NAME])
def test_a_mask_that_leaves_nothing_to_paint_is_refused(name):
    specimen = SPECIMENS[name]
    policy = DiffusersPolicy(specimen.build(), {**specimen.call, "strength": 0.8})
    rows = [replace(row, columns={**row.columns, "mask_image": RED}) for row in specimen.rows]
    with pytest.raises(InputError, match="^prompts: the mask of 'a red fox in the snow' leaves nothing to paint"):
        policy.check(rows)


@torch.no_grad()
def test_a_later_row_whose_mask_leaves_nothing_to_paint_is_named_once(caplog):
    walk, state = started()
    with caplog.at_level(logging.WARNING):
        walk.velocity(state, walk.sigmas[1], [ROW])
        assert not caplog.messages
        for sigma in walk.sigmas[1:-1]:
            (velocity,) = walk.velocity(state, sigma, [replace(ROW, columns={**ROW.columns, "mask_image": RED})])
            assert not velocity.any()
    assert [message.split(",")[0] for message in caplog.messages] == [
        "prompts: the mask of 'a red fox in the snow' leaves nothing to paint"
    ]
