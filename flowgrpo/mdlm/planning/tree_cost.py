"""Evaluations of a tree of answers, in the rollout and in the update, from the steps of its decoder."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise

from flowgrpo.mdlm.decoding.tokens.branching import Branching
from flowgrpo.mdlm.methods.likelihoods.likelihood import Likelihood
from flowgrpo.mdlm.planning.decoder_steps import DecodingCost


@dataclass(frozen=True)
class Span:
    """The steps between two places where a tree may split."""

    branches: int  # that a tree has there; with entropy the most
    tokens: tuple[int, ...]  # that each step of a branch commits, see `DecodingCost.blocks`


def spans(blocks: tuple[tuple[int, ...], ...], split: Branching) -> list[Span]:
    """Return the parts of a decode between the places of a tree; `blocks` are one of `DecodingCost.blocks`."""
    before = [sum(map(len, blocks[:block])) + min(step, len(blocks[block])) for block, step in split.places]
    tokens = tuple(chain.from_iterable(blocks))
    return [
        Span(split.factor ** min(number, split.depth), tokens[first:last])
        for number, (first, last) in enumerate(pairwise((0, *before, len(tokens))))
    ]


def count_rollout(walk: DecodingCost, split: Branching, rows: int) -> tuple[int, bool]:
    """Return the evaluations of the rollout of a tree, and whether they are exact, not an upper bound.

    The first step behind a split is evaluated once for all branches that a call of `rows` rows holds. With entropy a tree
    costs the most if it splits at its first places.
    """
    entropies = 0
    if split.entropy is not None:  # an evaluation of each branch at each place
        entropies = sum(split.factor ** min(number, split.depth) for number in range(len(split.places)))
    steps = [_count_steps(spans(blocks, split), split, rows) for blocks in walk.blocks]
    exact = walk.fixed and split.entropy is None and min(steps) == max(steps)
    return max(steps) * walk.branches + entropies, exact


def _count_steps(parts: list[Span], split: Branching, rows: int) -> int:
    steps = sum(part.branches * len(part.tokens) for part in parts)
    for before, part in pairwise(parts):
        if part.tokens and part.branches > before.branches:
            steps -= part.branches - before.branches * -(-split.factor // rows)
    return steps


def count_levels(walk: DecodingCost, split: Branching) -> tuple[int, bool]:
    """Return how many branches on the way to an answer have tokens, and whether this is exact, not an upper bound."""
    if walk.block_size is not None or split.entropy is not None:
        return split.depth + 1, False
    return sum(any(part.tokens) for part in spans(walk.blocks[0], split)), walk.fixed


def count_shared_views(walk: DecodingCost, split: Branching, likelihood: Likelihood) -> int | None:
    """Return the views of a tree whose branches are trained on once, at most; None if a model has blocks.

    The number is exact if the walk is, the likelihood scores the whole canvas, and the tree has no entropy. With the scope
    `eos` answers end at different tokens. Then a view of a branch is evaluated for each answer that is the first to score
    one of its tokens.
    """
    if walk.block_size is not None:
        return None
    parts = spans(walk.blocks[0], split)
    if likelihood.by_branch and split.entropy is not None:
        length = sum(sum(part.tokens) for part in parts)
        parts = [Span(split.factor**level, (length,)) for level in range(split.depth + 1)]
    elif likelihood.by_branch:
        parts = [Span(part.branches, (sum(part.tokens),)) for part in parts]
    whole = likelihood.scope == "canvas"
    return sum(
        part.branches * min(count, 1 if whole else split.leaves // part.branches)
        for part in parts
        for count in part.tokens
    )
