"""BAPO's clip range, which moves until good samples contribute as much as bad ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from flowgrpo.schema.base import Positive, Strict
from flowgrpo.schema.imports.heavy import Tensor, torch

Pair = Annotated[list[Positive], Field(min_length=2, max_length=2)]


class Balance(Strict):
    """How a clip range moves in each optimizer step, from `clip_range` towards `end` (BAPO, arXiv 2510.18927)."""

    target: Positive = 1.0
    """Least ratio of the contributions of good and of bad samples; 1 asks for half of all."""
    end: Pair = [0.1, 2.0]
    """Clip range to end at: a smaller low clips more bad samples, a larger high clips fewer good ones."""
    step: Positive = 0.05
    """Size of a step of high."""

    def highs(self, start: float) -> list[float]:
        """Return the values of high that are tried before that of `end`, from `start` on."""
        return [start + i * self.step for i in range(int((self.end[1] - start) / self.step + 1e-9) + 1)]

    def find(
        self, start: tuple[float, float], ratio: Tensor, advantage: Tensor, reduce: Callable[[Tensor], Tensor]
    ) -> tuple[float, float]:
        """Return the clip range (low, high) of an optimizer step with ratios (N,) and advantages (N,); a collective call.

        With the contributions g = sum of A min(r, 1 + high) over A > 0, and b = sum of |A| max(r, 1 - low) over A < 0, it is
        `start` if g >= target b. Otherwise low is that of `end`, and high the first tried value for which g >= target b, or
        that of `end`. As in the released code the lower bound 1 - low moves before the upper one; since b only grows with
        it, it goes all the way. `reduce` sums a tensor over the processes, so that all find the same range. While the policy
        has not moved, g and b are the same for every range.
        """
        highs, weight = self.highs(start[1]), advantage.double()
        r = ratio.double()[:, None]
        uppers, lowers = (1 + r.new_tensor(highs), 1 - r.new_tensor([start[0], self.end[0]]))
        good = (weight.clamp(min=0)[:, None] * r.minimum(uppers)).sum(0)
        bad = (-weight.clamp(max=0)[:, None] * r.maximum(lowers)).sum(0)
        *sums, first, last = reduce(torch.cat([good, self.target * bad])).tolist()
        if sums[0] >= first:
            return start
        return self.end[0], next((high for high, each in zip(highs, sums, strict=True) if each >= last), self.end[1])
