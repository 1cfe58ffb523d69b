"""Probabilities over a vocabulary, a few positions at a time."""

import pytest
import torch
from predictors import random_table

from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.tokens import logit_chunks

LENGTH = 8
PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_portions_are_all_rows_in_their_order(monkeypatch):
    monkeypatch.setattr(logit_chunks, "CACHED", 35)
    rows = torch.arange(13)
    assert [rows[each].tolist() for each in logit_chunks.portions(torch.empty(13, 7))] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11, 12],
    ]
    assert len(list(logit_chunks.portions(torch.empty(3, 100)))) == 3  # never none at once
    assert not list(logit_chunks.portions(torch.empty(0, 7)))


@pytest.mark.parametrize("name", ["low_confidence", "maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_decode_is_the_same_in_portions(name, temperature, monkeypatch):
    predictor = random_table(LENGTH + PROMPT.shape[1])
    decoder = build({"name": name, "proposal": {"temperature": temperature, "top_p": 0.9}}, LENGTH)
    found = []
    for numbers in (logit_chunks.CACHED, 1):
        monkeypatch.setattr(logit_chunks, "CACHED", numbers)
        found.append(decode(predictor, PROMPT, decoder, [("a", 0), ("a", 1)]))
    for one, other in zip(*(vars(each).values() for each in found), strict=True):
        assert torch.equal(one, other)
