"""Tokens are drawn by one number each, and are the likeliest where there is none."""

import pytest
import torch

from flowgrpo.mdlm.decoding.tokens.token_proposals import categorical


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
