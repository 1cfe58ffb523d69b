"""Committers: (step, scores (R, W)) -> positions to commit (R, W) bool.

Scores are -inf at positions that are not open, and a commit there is ignored. Of equal scores the first position wins.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.tokens.regions import ascending, ascending_sizes
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep, Fraction, Frame, setting
from flowgrpo.schema.base import Choice, Count, NotNegative, named
from flowgrpo.schema.imports.heavy import Tensor, torch


class Committer(Choice):
    """Choice of the positions that take their token at a step."""

    @property
    def paced(self) -> bool:
        """Return whether a block is full after a fixed number of steps."""
        return True

    def block_steps(self, frame: Frame) -> int | None:
        """Return the steps that fill a block; None if scores decide."""
        return frame.block_steps if self.paced else None

    @abstractmethod
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        """Return the positions (R, W) bool to commit."""


class Even(Committer):
    """LLaDA's code (arXiv 2502.09992): spread a block's masks evenly over its steps; the first steps take the remainder."""

    name: Literal["even"] = "even"

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        return best(scores, even_share(step))


class Ascending(Committer):
    """ASS (arXiv 2509.23924 and its code): steps of ascending size, see `regions.ascending_sizes`.

    The last step of a block takes the rest. Given tokens do not change the sizes, so a row with given tokens fills sooner.
    """

    name: Literal["ascending"] = "ascending"

    @property
    @override
    def paced(self) -> bool:
        return False

    @override
    def block_steps(self, frame: Frame) -> None:
        ends = frame.region.ends
        place = f"{frame.place}.region"
        if ascending(ends[-1], len(ends), place).ends != ends:
            raise InputError(f"{place}: steps of ascending size need the region ascending")

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        region = step.frame.region
        steps = ascending_sizes(region.length, len(region.ends))[step.block]
        size = steps[step.in_block] if step.in_block < len(steps) - 1 else scores.shape[1]
        return best(scores, torch.full_like(step.row, size))


class Remaining(Committer):
    """Dream's code: a share of the masks stays, rounded up; none at the last step.

    Dream's code takes the mean number of masks in the batch; here each row has its own count, so rows are independent. As
    in Dream's code, a step may commit nothing.
    """

    name: Literal["remaining"] = "remaining"
    ratio: Fraction | None = None
    """Share of the masks that stays; null: s / t for a step from time t to s, as in Dream's code."""
    least: Annotated[int, Field(ge=0)] = 0
    """Positions that a step commits at least."""

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        if step.last:
            return step.open
        count = (step.open.sum(1) * (1 - stays(self.ratio, step))).floor().long().clamp(min=self.least)
        return best(scores, count)


class Bernoulli(Committer):
    """`origin` of Dream's code: whatever the scores, commit with probability 1 - `ratio`; all at the last step."""

    name: Literal["bernoulli"] = "bernoulli"
    ratio: Fraction | None = None
    """Probability that a position stays masked; null: s / t for a step from time t to s."""

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        if step.last:
            return step.open
        committed = torch.zeros_like(step.open)
        committed[step.open] = step.uniform("commit") >= stays(self.ratio, step)[step.owner]
        return committed


class Threshold(Committer):
    """Fast-dLLM (arXiv 2505.22618): commit all positions whose score reaches a threshold, and the surest one in any case.

    `share` is from diffusers' `BlockRefinementScheduler`, which compares with > instead of >=. `most` is from TraceLock
    (arXiv 2605.24697).
    """

    name: Literal["threshold"] = "threshold"
    threshold: NotNegative
    """Positions with at least this score are committed."""
    share: bool = False
    """Commit at least as many positions as even would, so that a block is full after its steps."""
    most: Count | None = None
    """Most positions that a step commits because of the threshold; null: any number."""

    @property
    @override
    def paced(self) -> bool:
        return self.share

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        sure = scores >= self.threshold
        if self.most is not None:
            sure &= best(scores, torch.full_like(step.index, self.most))
        share = even_share(step).clamp(min=1) if self.share else torch.ones_like(step.index)
        return sure | best(scores, share)


class Factor(Committer):
    """Fast-dLLM (arXiv 2505.22618): commit the n surest, for the largest n whose n-th score >= 1 - factor / (n + 1).

    At least one is committed. The paper's code also commits the last position of a block if all others pass; this does not.
    """

    name: Literal["factor"] = "factor"
    factor: NotNegative
    """How unsure the positions may be that a step commits together; 0: only scores of 1."""

    @property
    @override
    def paced(self) -> bool:
        return False

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        n = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
        sure = scores.sort(dim=1, descending=True).values >= 1 - self.factor / (n + 1)
        count = torch.where(sure, n, 1.0).amax(1)
        return best(scores, count)


COMMITTERS = named(Even, Ascending, Remaining, Bernoulli, Threshold, Factor)


def stays(ratio: Fraction | None, step: DecodeStep) -> Tensor:
    """Return the ratio (R,) float64 of masks that stay.

    By default s / t for the step from time t to s, where times are a linspace from 1 to 1e-3 (Dream's code).
    """
    if ratio is not None:
        return setting(ratio, step)
    steps = step.frame.block_steps
    times = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64, device=step.open.device)
    j = min(step.in_block, steps - 1)
    return (times[j + 1] / times[j]).expand(step.row.shape)


def best(scores: Tensor, count: Tensor) -> Tensor:
    """Return which scores (R, W) bool are among the `count` (R,) largest of their row."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    first = torch.arange(scores.shape[1], device=scores.device) < count[:, None]
    return torch.empty_like(first).scatter_(1, order, first)


def even_share(step: DecodeStep) -> Tensor:
    """Return how many (R,) of a block's masks this step commits; all from the last step on."""
    if step.last:
        return torch.full_like(step.block_masks, step.open.shape[1])
    steps = step.frame.block_steps
    # The first `block_masks % steps` steps round up, the others down.
    return (step.block_masks + (steps - 1 - step.in_block)) // steps
