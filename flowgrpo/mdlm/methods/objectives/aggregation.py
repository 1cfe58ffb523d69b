"""How much each token, and each answer, weighs in the loss: weights (B, L) that replace a mean.

An answer's weight in objectives of whole answers is the sum of its tokens'. Weights belong to one optimizer step: make them
for all its rows at once, then cut into micro-batches. Rows on other processes are counted through `reduce`, the sum of a
tensor over the processes. All sum to 1 but those of `fixed_length`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from flowgrpo.schema.base import Choice
from flowgrpo.schema.imports.heavy import Tensor, torch

Reduce = Callable[["Tensor"], "Tensor"]
Aggregate = Callable[["Tensor", "Tensor", "Tensor", Reduce], "Tensor"]


def alone(total: Tensor) -> Tensor:
    """The sum over the processes where there is one."""
    return total


def token_mean(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Every scored token alike, so that long answers weigh more (diffu-GRPO, DAPO, SPG).

    Args: (of all functions here)
        scored: (B, L) bool.
        advantage: (B,)
        step: (B, L) int64, the step that each token belongs to; see `Views.first`.
    """
    return _over(scored.float(), reduce)


def sequence_mean(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Every answer alike, its tokens alike among themselves (GRPO, GDPO)."""
    return _over(scored / scored.sum(1, keepdim=True).clamp(min=1), reduce)


def step_mean(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Every step of every answer alike, in it every token (TraceRL; CJ-GRPO, whose answers have equally many steps)."""
    last = int(step.max()) + 1 if len(step) else 0
    at = step.where(scored, last)  # what is not scored goes to a step of its own, which is dropped
    counts = torch.zeros(len(scored), last + 1, device=scored.device).scatter_add_(1, at, scored.float())
    return _over(scored / counts.gather(1, at).clamp(min=1), reduce)


def fixed_length(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """1 / (N L) of the canvas for each scored token, N the answers with A != 0: no answer's own length divides anything.

    JustGRPO's; Dr. GRPO has all answers for N.
    """
    answers = reduce((advantage != 0).sum().float())
    return scored / (answers.clamp(min=1) * scored.shape[1])


def balanced(scored: Tensor, advantage: Tensor, step: Tensor, reduce: Reduce = alone) -> Tensor:
    """Half for the tokens of answers with A > 0, half for those with A < 0; all for the one side if the other is empty.

    Good and bad answers then pull alike, however many and long they are. Answers with A = 0 weigh nothing.
    """
    sides = [scored & (advantage > 0)[:, None], scored & (advantage < 0)[:, None]]
    good, bad = (_over(side.float(), reduce) for side in sides)
    return _over(good + bad, reduce)


AGGREGATIONS: dict[str, Aggregate] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "step_mean": step_mean,
    "fixed_length": fixed_length,
    "balanced": balanced,
}


class Aggregation(Choice):
    """What a token weighs in the loss, by `name`."""

    name: Literal["token_mean", "sequence_mean", "step_mean", "fixed_length", "balanced"]

    @property
    def weights(self) -> Aggregate:
        """The weights (B, L) of tokens."""
        return AGGREGATIONS[self.name]


def _over(weights: Tensor, reduce: Reduce) -> Tensor:
    """Weights over their sum on all processes; all 0 where that is 0."""
    total = reduce(weights.sum())
    return weights / total if total > 0 else weights
