"""What changes scores before they are compared: (step, proposals, scores (N,)) -> scores (N,)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flowgrpo.mdlm.decoding.proposals import Proposed
from flowgrpo.mdlm.decoding.step import Setting, Step, setting
from flowgrpo.schema.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")


@dataclass(frozen=True)
class Eoser:
    """The scores of positions that propose the end are lowered early on, so that a completion does not end at once.

    EOSER (arXiv 2509.23924 and its code): score x gamma, gamma = low + (high - low) progress. At step s of S the progress is
    s / (S - 1) where `progress` is `linear`, and (2^(s + 1) - 1) / 2^S where it is `ascending`, the fraction of the tokens
    that steps of ascending size have committed when the step is done. A single step has gamma = high.

    Attributes:
        steps: S.
    """

    eos_id: int
    steps: int
    low: float = 0.4
    high: float = 1.0
    progress: Literal["linear", "ascending"] = "linear"

    def __call__(self, step: Step, proposed: Proposed, scores: Tensor) -> Tensor:
        """Scores, lowered where the end is proposed."""
        gamma = torch.tensor([self.gamma(int(s)) for s in step.index], device=scores.device)[step.owner]
        return torch.where(proposed.tokens == self.eos_id, scores * gamma.to(scores.dtype), scores)

    def gamma(self, s: int) -> float:
        """The factor at step s."""
        if self.progress == "ascending":
            done = (2 ** (s + 1) - 1) / 2**self.steps
        else:
            done = s / (self.steps - 1) if self.steps > 1 else 1.0
        return self.low + (self.high - self.low) * min(done, 1.0)


@dataclass(frozen=True)
class Gumbel:
    """Scores are drawn: score / temperature plus Gumbel noise; 0 leaves them alone.

    The k largest are then k draws without replacement from softmax(score / temperature), `alg_temp` of Dream's code.
    """

    temperature: Setting

    def __call__(self, step: Step, proposed: Proposed, scores: Tensor) -> Tensor:
        """Scores with noise."""
        temperature = setting(self.temperature, step)[step.owner]
        noisy = temperature > 0
        if not noisy.any():
            return scores
        gumbel = -torch.log(-torch.log(step.uniform("gumbel").clamp(min=torch.finfo(torch.float64).tiny)))
        return torch.where(noisy, scores.double() / temperature.where(noisy, 1.0) + gumbel, scores.double())


@dataclass(frozen=True)
class HeldBack:
    """Positions that propose one of some tokens come last, until a row holds one of them.

    TraceLock (arXiv 2605.24697) accepts no end or padding by its threshold before there is an end. Here that is so for
    whatever compares scores.
    """

    tokens: tuple[int, ...]

    def __call__(self, step: Step, proposed: Proposed, scores: Tensor) -> Tensor:
        """Scores, the lowest number where a token is held back."""
        tokens = torch.tensor(self.tokens, device=scores.device)
        none_yet = ~torch.isin(step.completion, tokens).any(1)[step.owner]
        return scores.masked_fill(none_yet & torch.isin(proposed.tokens, tokens), torch.finfo(scores.dtype).min)
