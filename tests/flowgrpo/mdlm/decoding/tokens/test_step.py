"""Random numbers of a decode are those at their addresses, and steps are shared among blocks."""

import pytest
import torch

from flowgrpo.mdlm.decoding.tokens.regions import even, fit_blocks
from flowgrpo.mdlm.decoding.tokens.step import Draws, Frame
from samplers import noise

SEEDS = [(7, "row", number) for number in range(4)]


@pytest.mark.parametrize("purpose", ["token", "commit"])
@pytest.mark.parametrize(("row", "step"), [([0, 1, 2, 3], [0, 0, 0, 0]), ([0, 2], [1, 2]), ([0, 1, 3], [3, 1, 9])])
def test_numbers_are_those_of_row_purpose_and_step(purpose, row, step):
    wanted = [(SEEDS[r], purpose, s) for r, s in zip(row, step, strict=True)]
    assert torch.equal(Draws(SEEDS, 5).of(purpose, torch.tensor(row), torch.tensor(step)), noise.uniforms(wanted, 5))


@pytest.mark.parametrize(("steps", "length", "told"), [(12, 12, 4), (6, 12, 2), (5, 10, 2), (10, 10, 4)])
def test_a_block_of_a_block_causal_model_has_its_part_of_the_steps(steps, length, told):
    """Blocks of 4: of 10 tokens there are two and a half."""
    frame = Frame(region=fit_blocks(even(length), 4, "decoder.region"), steps=steps)
    assert frame.block_steps == told
