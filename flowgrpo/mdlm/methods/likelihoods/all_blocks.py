"""The likelihood whose views hide tokens in every block at once (EBPO)."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.likelihood import Likelihood
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views, finished, nothing_scored, score, scored_rows
from flowgrpo.schema.base import Count
from flowgrpo.schema.imports.heavy import np, torch


def all_blocks(answers: Answers, draws: int = 2) -> Views:
    """EBPO (LLaDA2.1, arXiv 2602.08676, equation 5): the sum of the ELBOs of all blocks, with a mask rate for each block.

    A view hides k = floor(t m) + 1 random tokens of each block, where m counts its scored tokens, and scores them with
    weight m / k. As k ~ U{1..m}, the mean over the draws is unbiased. The model predicts a block from its view and the
    clean blocks before it, so one evaluation covers all blocks.

    The rates of an answer are stratified as in the DARE code: the block b of B in draw j of n has the rate
    t = u + (j B + b) / (n B), modulo 1, with one u ~ U(0, 1). With full attention the answer is one block, and the
    estimate has the law of `exact_k`: with stratified draws if n divides the length.
    """
    hidden, weight = nothing_scored(answers, draws)
    blocks = torch.zeros_like(answers.scored, dtype=torch.long) if answers.blocks is None else answers.blocks
    for row, random, positions in scored_rows(answers, "all_blocks"):
        number = blocks[row].cpu().numpy()[positions]
        parts = [positions[number == block] for block in np.unique(number)]
        cells = draws * len(parts)
        for cell, rate in enumerate((random.random() + np.arange(cells) / cells) % 1):
            view, part = cell // len(parts), parts[cell % len(parts)]
            k = int(rate * len(part)) + 1
            score(hidden, weight, (view, row, random.permutation(part)[:k]), len(part) / (k * draws))
    return finished(answers, hidden, weight)


class AllBlocks(Likelihood):
    """A random part of every block, for the sum of the blocks' ELBOs (EBPO)."""

    name: Literal["all_blocks"] = "all_blocks"
    draws: Count = 2
    """Random masks of an answer."""

    @override
    def views(self, answers: Answers) -> Views:
        return all_blocks(answers, self.draws)
