"""Views that hide tokens in every block: their law, and what they are for one block and for blocks of one token."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import floor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from predictors import MASK, PAD, llama
from toy_predictor import answers

from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods.likelihoods import likelihood, masked_views
from flowgrpo.mdlm.methods.likelihoods.all_blocks import all_blocks
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate


class Numbers:
    """A generator of chosen numbers: u of a uniform one, floor(u n) of n integers, and permutations of a seed."""

    def __init__(self, u):
        self.u, self.order = u, np.random.default_rng(5)

    def random(self):
        return float(self.u)

    def integers(self, count, size):
        return np.full(size, floor(self.u * count))

    def permutation(self, positions):
        return self.order.permutation(positions)


@pytest.fixture
def numbers(monkeypatch):
    """Let the views of all rows be drawn from the numbers of u."""
    return lambda u: monkeypatch.setattr(masked_views, "noise", SimpleNamespace(generator=lambda *_: Numbers(u)))


def in_blocks(size, length=7, prompt=5, end=None):
    """An answer behind a prompt that ends within a block."""
    ids = torch.randint(13, (1, prompt + length), generator=torch.Generator().manual_seed(2))
    scored = torch.arange(length)[None] < (length if end is None else end)
    return Answers(
        ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        scored=scored,
        addresses=[("row",)],
        block_size=size,
    )


@pytest.mark.parametrize("draws", [1, 2, 3])
@pytest.mark.parametrize("size", [None, 16], ids=["full attention", "a block longer than the row"])
def test_one_block_is_exact_k(numbers, draws, size):
    given = replace(answers(scope="canvas"), block_size=size)  # six tokens, which the draws divide
    for sixth in range(6):
        numbers(Fraction(2 * sixth + 1, 12))
        found, expected = all_blocks(given, draws), likelihood.exact_k(given, draws, stratified=True)
        assert torch.equal(found.hidden, expected.hidden)
        torch.testing.assert_close(found.weight, expected.weight)


def test_blocks_of_one_token_are_autoregressive():
    given, predictor = in_blocks(1), MaskPredictor(llama(), MASK, PAD, block_size=2)
    predictor.block_size = 1  # no model has such blocks, and its probe would refuse them
    found, expected = all_blocks(given, draws=1), likelihood.autoregressive(given)
    for field in ("hidden", "weight", "view_weight"):
        assert torch.equal(getattr(found, field), getattr(expected, field))
    chain = 0.0
    for place in range(5, 12):  # each token by itself: the clean ones before it, and a mask
        seen = torch.cat([given.ids[:, :place], torch.tensor([[MASK]])], dim=1)
        causal = torch.full((place + 1, place + 1), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)
        logits = predictor.model(seen, attention_mask=causal[None, None]).logits[0, -1]
        logits[MASK] = -torch.inf
        chain += float(logits.log_softmax(-1)[given.ids[0, place]].detach())
    before = predictor.evaluations
    assert estimate(predictor, given, found, 8).seq.item() == pytest.approx(chain, abs=1e-9)
    assert predictor.evaluations - before == 1  # of one row, for all tokens


@pytest.mark.parametrize("draws", [1, 2])
def test_rates_are_one_offset_apart_and_every_count_is_as_likely(numbers, draws):
    """Blocks of 3, 4 and 2 scored tokens, whose counts k have period 12 in u; written once more, in fractions."""
    given, sizes = in_blocks(4, length=11, end=9), [3, 4, 2]
    numbered = given.blocks[0, :9]
    assert torch.bincount(numbered)[1:].tolist() == sizes
    seen, cells, steps = Counter(), 3 * draws, 144 * draws
    for step in range(steps):
        u = Fraction(2 * step + 1, 2 * steps)
        numbers(u)
        views = all_blocks(given, draws)
        for cell in range(cells):
            view, block = divmod(cell, 3)
            size = sizes[block]
            k = floor((u + Fraction(cell, cells)) % 1 * size) + 1
            own = views.weight[view, 0, :9][numbered == block + 1]
            assert sorted(own.tolist()) == pytest.approx([0.0] * (size - k) + [size / (k * draws)] * k)
            seen[view, block, k] += 1
        assert views.hidden[:, 0, -2:].all()  # behind the end
    assert all(seen[view, block, k] == steps // size for view in range(draws) for block, size in enumerate(sizes)
               for k in range(1, size + 1))  # fmt: skip
