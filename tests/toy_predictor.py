"""A predictor that is small enough to enumerate: one layer of attention in float64; answers for it, and their views."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from flowgrpo.mdlm.methods.likelihoods import likelihood
from flowgrpo.mdlm.methods.likelihoods.all_blocks import all_blocks
from flowgrpo.mdlm.methods.likelihoods.answers import Answers, in_scope

VOCABULARY, EOS, MASK = 7, 5, 6
PLANS = {
    "one_step": likelihood.one_step,
    "coupled_as_released": likelihood.coupled_as_released,
    "coupled": likelihood.coupled,
    "bernoulli": partial(likelihood.bernoulli, draws=2),
    "exact_k": partial(likelihood.exact_k, draws=3, stratified=True),
    "antithetic": partial(likelihood.exact_k, draws=2, antithetic=True),
    "quadrature": partial(likelihood.quadrature, nodes=3, draws=2),
    "autoregressive": likelihood.autoregressive,
    "trajectory": likelihood.trajectory,
    "shrunk": partial(likelihood.trajectory, shrink=2),
    "blocks": partial(likelihood.blocks, size=2, draws=3),
    "all_blocks": partial(all_blocks, draws=3),
}


class Toy(nn.Module):
    """Bidirectional, indifferent to left padding, and sensitive to what it sees."""

    mask_id, block_size = MASK, None

    def __init__(self, seed=0, width=8, dtype=torch.float64, gain=1.0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        shapes = {
            "token": (VOCABULARY, width),
            "place": (64, width),
            "mix": (3, width, width),
            "out": (width, VOCABULARY),
        }
        for name, shape in shapes.items():
            scale = gain * (1.0 if name in ("token", "place") else shape[-2] ** -0.5)
            self.register_parameter(name, nn.Parameter(scale * torch.randn(shape, generator=random, dtype=dtype)))
        self.evaluations = 0

    def logits(self, ids, attention_mask, start=0):
        self.evaluations += len(ids)
        places = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.token[ids] + self.place[places]
        query, key, value = (x @ matrix for matrix in self.mix)
        score = (query @ key.mT / key.shape[-1] ** 0.5).masked_fill(~attention_mask[:, None], -1e9)
        x = torch.tanh(x + score.softmax(-1) @ value)
        forbidden = torch.arange(VOCABULARY) == MASK
        return (x @ self.out).masked_fill(forbidden, -torch.inf)[:, start:]

    def logits_at(self, ids, attention_mask, where):
        return self.logits(ids, attention_mask)[where]


def answers(rows=1, scope="eos", length=6, prompt=3, end=4, name="test"):
    """Rows that differ in all: row r has a prompt of prompt + r % 2 tokens, its EOS at end - r % 3, and EOS behind it."""
    random = torch.Generator().manual_seed(7)
    width = prompt + (rows > 1)
    ids = torch.randint(EOS, (rows, width + length), generator=random)
    attention = torch.ones_like(ids, dtype=torch.bool)
    for row in range(rows):
        attention[row, : width - prompt - row % 2] = False
        ids[row, width + end - row % 3 :] = EOS
    steps = torch.stack([torch.randperm(length, generator=random) // 2 for _ in range(rows)])
    addresses = [(name, row) for row in range(rows)]
    scored = in_scope(ids[:, width:], EOS, scope)
    return Answers(ids=ids, attention_mask=attention, scored=scored, addresses=addresses, steps=steps)


def copies(one, count):
    """The first row so many times, each at an address of its own."""
    many = one.of(torch.zeros(count, dtype=torch.long))
    return replace(many, addresses=[("copy", i) for i in range(count)])
