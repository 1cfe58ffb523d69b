"""How sure a position is of its proposal, by hand."""

import math

import pytest
import torch
from predictors import MASK

from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep, Draws

PROBABILITIES = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)


def scored(name, **proposal):
    """Scores of two open positions, the second and the fourth, behind a first one."""
    decoder = build({"name": "low_confidence", "scorer": name, "proposal": proposal}, 4)
    number, ids = torch.tensor([0]), torch.full((1, 4), MASK)
    step = DecodeStep(
        frame=decoder.frame,
        row=number,
        index=number,
        in_block=0,
        block_masks=number + 4,
        block=0,
        start=0,
        open=torch.tensor([[False, True, False, True]]),
        ids=ids,
        attention_mask=ids == MASK,
        prompt=0,
        draws=Draws(["row"], 4),
    )
    return decoder.scorer(step, decoder.proposal(step, PROBABILITIES.log())).tolist()


def entropy(*probabilities):
    return -sum(p * math.log(p) for p in probabilities)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("confidence", [0.5, 0.8]),
        ("sampled", [0.5, 0.8]),
        ("margin", [0.2, 0.7]),
        ("entropy", [-entropy(0.5, 0.3, 0.2), -entropy(0.1, 0.1, 0.8)]),
        ("left_to_right", [-1, -3]),
    ],
)
def test_scores_by_hand(name, told):
    assert scored(name) == pytest.approx(told)


def test_some_scores_are_of_what_is_cut_and_others_of_what_the_model_says():
    """Of the two likeliest tokens: 5/8 and 3/8, and 8/9 and 1/9."""
    assert scored("confidence", top_k=2) == pytest.approx([0.5, 0.8])
    assert scored("sampled", top_k=2) == pytest.approx([5 / 8, 8 / 9])
    assert scored("margin", top_k=2) == pytest.approx([2 / 8, 7 / 9])
    assert scored("entropy", top_k=2) == pytest.approx([-entropy(5 / 8, 3 / 8), -entropy(8 / 9, 1 / 9)])
