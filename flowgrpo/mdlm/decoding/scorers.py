"""Which open position is surest of its proposal: a score (N,) for each, larger is committed earlier.

Only some score by a `probability`, which thresholds and the damping of early ends suppose.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from flowgrpo.mdlm.decoding import controller_files
from flowgrpo.mdlm.decoding.proposals import Proposed
from flowgrpo.mdlm.decoding.step import DecodeStep
from flowgrpo.schema.base import Choice
from flowgrpo.schema.heavy import Tensor, torch
from flowgrpo.schema.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding import trace_lock
else:
    trace_lock = lazy("flowgrpo.mdlm.decoding.trace_lock")


class Scorer(Choice):
    """What every scorer has."""

    probability: ClassVar[bool] = False  # whether scores are probabilities
    hidden_layers: ClassVar[int] = 0  # hidden states that it wants

    def loaded(self, hidden_size: int | None) -> Callable[[DecodeStep, Proposed], Tensor]:
        """What scores: itself, where nothing is to be loaded.

        Args:
            hidden_size: width of the model's hidden states; None where it is not known yet.
        """
        return self

    @abstractmethod
    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """The scores (N,)."""


class Confidence(Scorer):
    """Probability of the proposed token before temperature and filters.

    `low_confidence` remasking of LLaDA (arXiv 2502.09992, code).
    """

    name: Literal["confidence"] = "confidence"
    probability: ClassVar[bool] = True

    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """The scores (N,)."""
        return proposed.logits.softmax(-1).gather(-1, proposed.tokens[:, None])[:, 0]


class Sampled(Scorer):
    """Probability of the proposed token under the distribution that it was drawn from: `maskgit_plus` of Dream's code."""

    name: Literal["sampled"] = "sampled"
    probability: ClassVar[bool] = True

    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """The scores (N,)."""
        return proposed.log_prob.exp()


class Margin(Scorer):
    """Probability of the likeliest token minus that of the second, tempered and filtered: `topk_margin` of Dream's code."""

    name: Literal["margin"] = "margin"
    probability: ClassVar[bool] = True

    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """The scores (N,)."""
        first, second = proposed.log_probs.exp().topk(2, dim=-1).values.unbind(-1)
        return first - second


class Entropy(Scorer):
    """Negative entropy of the tempered and filtered distribution: `entropy` of Dream's code, without its 1e-10."""

    name: Literal["entropy"] = "entropy"

    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """The scores (N,)."""
        return -torch.special.entr(proposed.log_probs.exp()).sum(-1)


class Uniform(Scorer):
    """A random number: `random` remasking of LLaDA's code."""

    name: Literal["uniform"] = "uniform"

    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """The scores (N,)."""
        return step.uniform("score")


class LeftToRight(Scorer):
    """The first open position before the others."""

    name: Literal["left_to_right"] = "left_to_right"

    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """The scores (N,)."""
        return -step.position.double()


class LearnedScorer(Choice):
    """What a trained `controller`, a folder, says of each position (TraceLock)."""

    name: Literal["learned"] = "learned"
    controller: str

    def loaded(self, hidden_size: int | None) -> trace_lock.Learned:
        """The scorer with its weights; arguments as of the others, errors as of `load_controller`."""
        controller_files.check_there(Path(self.controller))
        return trace_lock.Learned(trace_lock.load_controller(self.controller, hidden_size))
