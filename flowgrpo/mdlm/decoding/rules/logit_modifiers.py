"""Modifiers of scores: (step, proposals, scores (N,)) -> scores (N,)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.mdlm.decoding.tokens.step import DecodeStep, Frame, Setting, setting
from flowgrpo.mdlm.decoding.tokens.token_proposals import Proposed
from flowgrpo.schema.base import Choice, NotNegative
from flowgrpo.schema.imports.heavy import Tensor, torch

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(strict=False)]  # or, from Python, any other sequence


class Modifier(Choice):
    """A change of the scores before they are compared."""

    ends: ClassVar[bool] = False  # whether it needs an end-of-sequence token

    @abstractmethod
    def __call__(self, step: DecodeStep, proposed: Proposed, scores: Tensor) -> Tensor:
        """Return the changed scores (N,)."""


class EarlyEosDamping(Modifier):
    """EOSER (arXiv 2509.23924 and its code): lower the scores of end proposals early on.

    A score is multiplied by gamma = low + (high - low) progress. At step s of S the progress is s / (S - 1) (`linear`) or
    (2^(s + 1) - 1) / 2^S (`ascending`: the share of tokens that steps of ascending size have committed by then). A single
    step has gamma = high.
    """

    name: Literal["eoser"] = "eoser"
    ends: ClassVar[bool] = True
    low: NotNegative
    """The factor at the first step."""
    high: NotNegative
    """The factor at the last step."""
    progress: Literal["linear", "ascending"] = "linear"
    """How the factor rises: linear in the steps, or with the share of tokens that steps of ascending size commit."""

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed, scores: Tensor) -> Tensor:
        gamma = torch.tensor([self.gamma(int(s), step.frame.steps) for s in step.index], device=scores.device)
        gamma = gamma[step.owner].to(scores.dtype)
        return torch.where(proposed.tokens == step.frame.end, scores * gamma, scores)

    def gamma(self, s: int, steps: int) -> float:
        """Return the factor at step s of `steps`."""
        linear = s / (steps - 1) if steps > 1 else 1.0
        done = (2 ** (s + 1) - 1) / 2**steps if self.progress == "ascending" else linear
        return self.low + (self.high - self.low) * min(done, 1.0)


class Gumbel(Modifier):
    """`alg_temp` of Dream's code: score / temperature plus Gumbel noise.

    The k largest are k draws without replacement from softmax(score / temperature).
    """

    name: Literal["gumbel"] = "gumbel"
    temperature: Setting
    """Scores are divided by it; 0 leaves them alone."""

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed, scores: Tensor) -> Tensor:
        temperature = setting(self.temperature, step)[step.owner]
        noisy = temperature > 0
        if not noisy.any():
            return scores
        gumbel = -torch.log(-torch.log(step.uniform("gumbel").clamp(min=torch.finfo(torch.float64).tiny)))
        return torch.where(noisy, scores.double() / temperature.where(noisy, 1.0) + gumbel, scores.double())


class HeldBack(Modifier):
    """TraceLock (arXiv 2605.24697): proposals of the end, padding or `tokens` come last until the row holds one of them.

    The paper exempts them from its threshold; here they get the lowest score, which works for any committer.
    """

    name: Literal["held_back"] = "held_back"
    ends: ClassVar[bool] = True
    tokens: Tokens = []
    """Further tokens that are held back like the end."""

    def tokens_held(self, frame: Frame) -> tuple[int, ...]:
        """Return all tokens to hold back."""
        return (frame.end, *([] if frame.pad_id is None else [frame.pad_id]), *self.tokens)

    @override
    def __call__(self, step: DecodeStep, proposed: Proposed, scores: Tensor) -> Tensor:
        tokens = torch.tensor(self.tokens_held(step.frame), device=scores.device)
        none_yet = ~torch.isin(step.completion, tokens).any(1)[step.owner]
        return scores.masked_fill(none_yet & torch.isin(proposed.tokens, tokens), torch.finfo(scores.dtype).min)
