"""How far the answers of a group agree: the entropy over clusters of equal final answers (SEED-GRPO)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from rewards.texts import latex
from rewards.texts.text import final_answer


def meaning(text: str) -> str:
    r"""Return one spelling of an answer's meaning: its final answer (\boxed, ####, answer tags), or else the whole text.

    Numbers of one value are spelled alike, and so are answers that `rewards.texts.latex.normalise` makes equal.
    """
    answer = final_answer(text) or text.strip()
    number = latex.number(answer)
    return latex.normalise(answer) if number is None else str(number)


def semantic_entropy(meanings: Sequence[str]) -> float:
    """Return the entropy, in nats, of the shares of equal meanings among n answers; at most ln n."""
    counts = Counter(meanings).values()
    return -sum(count / len(meanings) * math.log(count / len(meanings)) for count in counts)


def certainty(group: Sequence[int], meanings: Sequence[str], *, sensitivity: float, groups: int) -> torch.Tensor:
    """Return the factor (G,) float64 of the advantages of each of G `groups`: 1 - sensitivity x SE / ln n.

    SE is the semantic entropy of the group's n answers, `group` (B) and `meanings` (B) are those of all answers. A group of
    one answer has the factor 1.

    SEED-GRPO (arXiv 2505.12346), *reconstructed* from secondary texts: they give the linear form and the division by the
    largest entropy, but not the sensitivity. The paper weighs a cluster by the probabilities of its answers and compares
    meanings; here a cluster weighs its number of answers, since a masked-diffusion model has no exact probability of an
    answer, and meanings are compared by their final answers.
    """
    factors = torch.ones(groups, dtype=torch.float64)
    for number in set(group):
        own = [each for of, each in zip(group, meanings, strict=True) if of == number]
        if len(own) > 1:
            factors[number] -= sensitivity * semantic_entropy(own) / math.log(len(own))
    return factors
