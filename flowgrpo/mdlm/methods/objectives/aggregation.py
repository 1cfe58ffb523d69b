"""Weights (B, L) of tokens in the loss; the loss is a weighted sum in place of a mean.

An answer's weight is the sum of its tokens' weights. Weights belong to one optimizer step: compute them for all its rows at
once, then cut them into micro-batches. `reduce` sums a tensor over the processes. Weights sum to 1 over all processes,
except those of `fixed_length`.

All functions take `scored` (B, L) bool, `advantage` (B,) of answers or (B, L) of tokens, and `step` (B, L) int64, the step
of each token (`Views.first`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from flowgrpo.mdlm.methods.objectives.token_shapes import Shape
from flowgrpo.schema.base import Choice
from flowgrpo.schema.imports.heavy import Tensor, torch

Reduce = Callable[["Tensor"], "Tensor"]
Aggregate = Callable[["Tensor", "Tensor", "Tensor", Reduce], "Tensor"]


def alone(total: Tensor) -> Tensor:
    """Return the sum over a single process."""
    return total


def token_mean(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Weigh every scored token alike, so that long answers weigh more (DAPO, arXiv 2503.14476; diffu-GRPO, SPG)."""
    return _over(scored.float(), reduce)


def sequence_mean(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Weigh every answer alike, and its tokens alike (GRPO, arXiv 2402.03300; GDPO)."""
    return _over(scored / scored.sum(1, keepdim=True).clamp(min=1), reduce)


def step_mean(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Weigh every step of every answer alike, and its tokens alike (TraceRL; CJ-GRPO, whose answers have equal steps)."""
    last = int(step.max()) + 1 if len(step) else 0
    at = step.where(scored, last)  # tokens that are not scored count in an extra step, so they change no other count
    counts = torch.zeros(len(scored), last + 1, device=scored.device).scatter_add_(1, at, scored.float())
    return _over(scored / counts.gather(1, at).clamp(min=1), reduce)


def fixed_length(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Weigh each scored token 1 / (N L), with L the canvas's length and N the number of answers with A != 0.

    So no answer is divided by its own length. From JustGRPO; in Dr. GRPO (arXiv 2503.20783) N is the number of all answers.
    """
    answers = reduce(((_by_token(advantage) != 0) & scored).any(1).sum().float())
    return scored / (answers.clamp(min=1) * scored.shape[1])


def balanced(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Give half of the weight to tokens of answers with A > 0, half to those with A < 0; all of it if only one side exists.

    Good and bad answers then pull equally, whatever their number and length. Answers with A = 0 weigh nothing.
    """
    sides = [scored & (_by_token(advantage) > 0), scored & (_by_token(advantage) < 0)]
    good, bad = (_over(side.float(), reduce) for side in sides)
    return _over(good + bad, reduce)


AGGREGATIONS: dict[str, Aggregate] = {
    weigh.__name__: weigh for weigh in (token_mean, sequence_mean, step_mean, fixed_length, balanced)
}


class Aggregation(Choice):
    """The weights of tokens, by `name`."""

    name: Literal["token_mean", "sequence_mean", "step_mean", "fixed_length", "balanced"]
    shape: Shape | None = None
    """Weights of single tokens beside it, by their predictions or by other answers; null: none."""

    @property
    def weights(self) -> Aggregate:
        """The function that computes the weights (B, L)."""
        return AGGREGATIONS[self.name]


def _by_token(values: Tensor) -> Tensor:
    return values if values.ndim == 2 else values[:, None]


def _over(weights: Tensor, reduce: Reduce) -> Tensor:
    """Divide weights by their sum over all processes; a sum of 0 leaves them 0."""
    total = reduce(weights.sum())
    return weights / total if total > 0 else weights
