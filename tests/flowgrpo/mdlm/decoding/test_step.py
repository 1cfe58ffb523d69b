"""Random numbers of a decode are those at their addresses, whichever rows are left and however far ahead they are drawn."""

import pytest
import torch

from flowgrpo.mdlm.decoding.proposals import categorical
from flowgrpo.mdlm.decoding.step import AHEAD, Draws
from samplers import noise

SEEDS = [(7, "row", number) for number in range(4)]
LEFT = [([0, 1, 2, 3], [0, 0, 0, 0]), ([0, 2], [1, 1]), ([0, 2], [2, 2]), ([0, 1, 2, 3], [3, 1, AHEAD + 1, 1])]


def test_numbers_are_those_of_row_purpose_and_step():
    draws = Draws(SEEDS, 5)
    for row, step in LEFT:
        for purpose in ("token", "commit"):
            table, entry = draws.of(purpose, torch.tensor(row), torch.tensor(step))
            wanted = [(SEEDS[r], purpose, s) for r, s in zip(row, step, strict=True)]
            assert torch.equal(table[entry], noise.uniforms(wanted, 5))


def test_the_numbers_of_a_few_steps_are_drawn_at_once(monkeypatch):
    asked, real = [], noise.uniforms
    monkeypatch.setattr(
        noise, "uniforms", lambda addresses, width: (asked.append(len(addresses)), real(addresses, width))[1]
    )
    draws = Draws(SEEDS, 5)
    for step in range(2 * AHEAD):
        draws.of("token", torch.arange(4), torch.full((4,), step))
    assert asked == [4 * AHEAD, 4 * AHEAD]


@pytest.mark.parametrize("scale", [1.0, 0.3, 1.0 - 2**-30])
def test_the_largest_number_below_one_draws_a_token(scale):
    """The last one of the table has the rest of the probability, also where all do not sum to 1."""
    log_probs = (scale * torch.rand(2000, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)).log()
    largest = torch.full((2000,), 1 - 2**-53, dtype=torch.float64)
    assert torch.equal(categorical(log_probs, largest), torch.full((2000,), 6))
    assert torch.equal(categorical(log_probs, torch.zeros_like(largest)), torch.zeros(2000, dtype=torch.long))


def test_no_token_is_drawn_by_or_from_what_is_no_number():
    log_probs = torch.full((2, 3), 1 / 3).log()
    log_probs[1, 1] = torch.nan
    assert categorical(log_probs, torch.tensor([torch.nan, 0.9], dtype=torch.float64)).tolist() == [3, 3]
