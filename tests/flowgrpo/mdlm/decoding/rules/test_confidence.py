"""How sure a position is of its proposal, by hand."""

import math

import pytest
import torch
from predictors import MASK

from flowgrpo.mdlm.decoding.decoders import build

PROBABILITIES = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)


def entropy(*probabilities):
    return -sum(p * math.log(p) for p in probabilities)


@pytest.mark.parametrize(
    ("name", "top_k", "expected"),
    [
        ("confidence", None, [0.5, 0.8]),
        ("sampled", None, [0.5, 0.8]),
        ("margin", None, [0.2, 0.7]),
        ("entropy", None, [-entropy(0.5, 0.3, 0.2), -entropy(0.1, 0.1, 0.8)]),
        ("left_to_right", None, [-1, -3]),
        # of the two likeliest tokens, 5/8 and 3/8, 8/9 and 1/9; confidence is of what the model says
        ("confidence", 2, [0.5, 0.8]),
        ("sampled", 2, [5 / 8, 8 / 9]),
        ("margin", 2, [2 / 8, 7 / 9]),
        ("entropy", 2, [-entropy(5 / 8, 3 / 8), -entropy(8 / 9, 1 / 9)]),
    ],
)
def test_scores_by_hand(first_step, name, top_k, expected):
    """Of two open positions, the second and the fourth."""
    decoder = build({"name": "low_confidence", "scorer": name, "proposal": {"top_k": top_k}}, 4)
    step = first_step(decoder, torch.full((1, 4), MASK), open=torch.tensor([[False, True, False, True]]))
    assert decoder.scorer(step, decoder.proposal(step, PROBABILITIES.log())).tolist() == pytest.approx(expected)
