"""Which open position is surest of its proposal: a score (N,) for each, larger is committed earlier.

A scorer is a function of a step and its proposals. Only those of `PROBABILITIES` score by a probability, which thresholds
and EOSER suppose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowgrpo.mdlm.decoding.proposals import Proposed
from flowgrpo.mdlm.decoding.step import Step
from flowgrpo.schema.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")


def confidence(step: Step, proposed: Proposed) -> Tensor:
    """Probability of the proposed token before temperature and filters.

    `low_confidence` remasking of LLaDA (arXiv 2502.09992, code).
    """
    return proposed.logits.softmax(-1).gather(-1, proposed.tokens[:, None])[:, 0]


def sampled(step: Step, proposed: Proposed) -> Tensor:
    """Probability of the proposed token under the distribution that it was drawn from: `maskgit_plus` of Dream's code."""
    return proposed.log_prob.exp()


def margin(step: Step, proposed: Proposed) -> Tensor:
    """Probability of the likeliest token minus that of the second, tempered and filtered: `topk_margin` of Dream's code."""
    first, second = proposed.log_probs.exp().topk(2, dim=-1).values.unbind(-1)
    return first - second


def entropy(step: Step, proposed: Proposed) -> Tensor:
    """Negative entropy of the tempered and filtered distribution: `entropy` of Dream's code, without its 1e-10."""
    return -torch.special.entr(proposed.log_probs.exp()).sum(-1)


def uniform(step: Step, proposed: Proposed) -> Tensor:
    """A random number: `random` remasking of LLaDA's code."""
    return step.uniform("score")


def left_to_right(step: Step, proposed: Proposed) -> Tensor:
    """The first open position before the others."""
    return -step.position.double()


PROBABILITIES = (confidence, sampled, margin)
