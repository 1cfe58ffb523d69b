"""Random numbers of a decode are those at their addresses, whichever rows are left and however far ahead they are drawn."""

import pytest
import torch

from flowgrpo.mdlm.decoding.tokens.regions import counted, even
from flowgrpo.mdlm.decoding.tokens.step import AHEAD, Draws, Frame
from samplers import noise

SEEDS = [(7, "row", number) for number in range(4)]
LEFT = [  # rows, and their steps
    ([0, 1, 2, 3], [0, 0, 0, 0]),
    ([0, 2], [1, 1]),
    ([0, 2], [2, 2]),
    ([0, 1, 2, 3], [3, 1, AHEAD + 1, 1]),  # two come back
    ([0, 2], [4, AHEAD + 2]),
    ([0, 2], [AHEAD + 4, AHEAD + 6]),
    ([0, 1, 2, 3], [AHEAD + 5, 2, AHEAD + 7, 2]),
]


def test_numbers_are_those_of_row_purpose_and_step():
    draws = Draws(SEEDS, 5)
    for row, step in LEFT:
        for purpose in ("token", "commit"):
            found = draws.of(purpose, torch.tensor(row), torch.tensor(step))
            wanted = [(SEEDS[r], purpose, s) for r, s in zip(row, step, strict=True)]
            assert torch.equal(found, noise.uniforms(wanted, 5))


def test_the_numbers_of_a_few_steps_are_drawn_at_once(monkeypatch):
    asked, real = [], noise.uniforms
    monkeypatch.setattr(
        noise, "uniforms", lambda addresses, width: (asked.append(len(addresses)), real(addresses, width))[1]
    )
    draws = Draws(SEEDS, 5)
    for step in range(2 * AHEAD):
        draws.of("token", torch.arange(4), torch.full((4,), step))
    assert asked == [4 * AHEAD, 4 * AHEAD]


@pytest.mark.parametrize(("steps", "length", "told"), [(12, 12, 4), (6, 12, 2), (5, 10, 2), (10, 10, 4)])
def test_a_block_of_a_block_causal_model_has_its_part_of_the_steps(steps, length, told):
    """Blocks of 4: of 10 tokens there are two and a half."""
    frame = Frame(region=counted(even(length), 4, "decoder.region"), steps=steps)
    assert frame.block_steps == told
