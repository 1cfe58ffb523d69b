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


def spans(walk: DecodingCost, split: Branching) -> list[Span] | None:
    """Return the parts of a decode between the places of a tree; None if the prompt decides how long they are."""
    if walk.blocks is None:
        return None
    before = [sum(map(len, walk.blocks[:block])) + min(step, len(walk.blocks[block])) for block, step in split.places]
    tokens = tuple(chain.from_iterable(walk.blocks))
    return [
        Span(split.factor ** min(number, split.depth), tokens[first:last])
        for number, (first, last) in enumerate(pairwise((0, *before, len(tokens))))
    ]


def count_rollout(walk: DecodingCost, split: Branching) -> tuple[int, bool]:
    """Return the evaluations of the rollout of a tree, and whether they are exact, not an upper bound.

    With entropy a tree costs the most if it splits at its first places.
    """
    parts, entropies = spans(walk, split), 0
    if split.entropy is not None:  # an evaluation of each branch at each place
        entropies = sum(split.factor ** min(number, split.depth) for number in range(len(split.places)))
    if parts is None:
        return split.leaves * walk.evaluations + entropies, walk.fixed and split.leaves == 1
    steps = sum(part.branches * len(part.tokens) for part in parts)
    return steps * walk.branches + entropies, walk.fixed and split.entropy is None


def count_levels(walk: DecodingCost, split: Branching) -> tuple[int, bool]:
    """Return how many branches on the way to an answer have tokens, and whether this is exact, not an upper bound."""
    parts = spans(walk, split)
    if parts is None or split.entropy is not None:
        return split.depth + 1, False
    return sum(any(part.tokens) for part in parts), walk.fixed


def count_shared_views(walk: DecodingCost, split: Branching, likelihood: Likelihood) -> int | None:
    """Return the views of a tree whose branches are trained on once, at most; None if the prompt decides.

    The number is exact if the walk is, the likelihood scores the whole canvas, and the tree has no entropy. With the scope
    `eos` answers end at different tokens. Then a view of a branch is evaluated for each answer that is the first to score
    one of its tokens.
    """
    parts = spans(walk, split)
    if parts is None:
        return None
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
