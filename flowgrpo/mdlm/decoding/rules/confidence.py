"""Scores (N,) of the open positions' proposals; larger ones are committed earlier.

Thresholds and the damping of early ends need a scorer with `probability`, whose scores are probabilities.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import override

from flowgrpo.mdlm.decoding.controller import controller_files
from flowgrpo.mdlm.decoding.tokens.logit_chunks import concatenate, portions
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep
from flowgrpo.mdlm.decoding.tokens.token_proposals import Proposed
from flowgrpo.schema.base import Choice, named
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.controller import trace_lock
else:
    trace_lock = lazy("flowgrpo.mdlm.decoding.controller.trace_lock")


class Scoring(Choice):
    """The config section of a scorer."""

    @abstractmethod
    def load(self, hidden_size: int | None, place: str) -> Callable[[DecodeStep, Proposed], Tensor]:
        """Return the function (step, proposals) -> scores (N,).

        `hidden_size` is the width of the model's hidden states, None if not known yet; `place` is the scorer's dotted key.
        Raises InputError if the files of a learned scorer are missing or do not fit the model.
        """


class Scorer(Scoring):
    """A scorer without a network: the config section is callable and computes the scores."""

    probability: ClassVar[bool] = False  # whether scores are probabilities
    hidden_layers: ClassVar[int] = 0  # number of hidden states that it reads

    @override
    def load(self, hidden_size: int | None, place: str) -> Scorer:
        return self

    @abstractmethod
    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        """Return the scores (N,)."""


class Confidence(Scorer):
    """Probability of the proposed token before temperature and filters: `low_confidence` of LLaDA's code."""

    name: Literal["confidence"] = "confidence"
    probability: ClassVar[bool] = True

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        logits, tokens = proposed.logits, proposed.tokens[:, None]
        return _in_portions(logits, lambda rows: logits[rows].softmax(-1).gather(-1, tokens[rows])[:, 0])


class Sampled(Scorer):
    """Probability of the proposed token under the distribution it was drawn from: `maskgit_plus` of Dream's code."""

    name: Literal["sampled"] = "sampled"
    probability: ClassVar[bool] = True

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        return proposed.log_prob.exp()


class Margin(Scorer):
    """Probability of the likeliest token minus that of the second, tempered and filtered: `topk_margin` of Dream's code."""

    name: Literal["margin"] = "margin"
    probability: ClassVar[bool] = True

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        best = _in_portions(proposed.logits, lambda rows: proposed.log_probs(rows).exp().topk(2, dim=-1).values)
        return best[:, 0] - best[:, 1]


class Entropy(Scorer):
    """Negative entropy of the tempered and filtered distribution: `entropy` of Dream's code, without its 1e-10."""

    name: Literal["entropy"] = "entropy"

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        return -_in_portions(proposed.logits, lambda rows: torch.special.entr(proposed.log_probs(rows).exp()).sum(-1))


class Uniform(Scorer):
    """A random number: `random` remasking of LLaDA's code."""

    name: Literal["uniform"] = "uniform"

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        return step.uniform("score")


class LeftToRight(Scorer):
    """First open position first."""

    name: Literal["left_to_right"] = "left_to_right"

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed) -> Tensor:
        return -step.position.double()


class LearnedScorer(Scoring):
    """Score of a trained controller (TraceLock)."""

    name: Literal["learned"] = "learned"
    controller: str
    """Folder of a controller that flowgrpo mdlm tracelock wrote."""

    @override
    def load(self, hidden_size: int | None, place: str) -> trace_lock.Learned:
        place = f"{place}.controller"
        controller_files.check_there(Path(self.controller), place)
        return trace_lock.Learned(trace_lock.load_controller(self.controller, hidden_size, place))


SCORERS = named(Confidence, Sampled, Margin, Entropy, Uniform, LeftToRight, LearnedScorer)


def _in_portions(logits: Tensor, compute: Callable[[slice], Tensor]) -> Tensor:
    return concatenate([compute(rows) for rows in portions(logits)])
