"""How many positions take their token at a step: (step, scores (R, W)) -> (R, W) bool.

Scores are -inf where nothing is open, and what is committed there is passed over. Of equal scores the first position goes
first.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.tokens.regions import ascending, ascending_sizes
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep, Fraction, Frame, setting
from flowgrpo.schema.base import Choice, Count, NotNegative
from flowgrpo.schema.imports.heavy import Tensor, torch


class Committer(Choice):
    """What every committer has."""

    @property
    def paced(self) -> bool:
        """Whether a block is full after a given number of steps, not after as many as scores decide."""
        return True

    def block_steps(self, frame: Frame) -> int | None:
        """Steps after which a block is full; None where it takes as many as it needs."""
        return frame.block_steps if self.paced else None

    @abstractmethod
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        """The positions (R, W) bool that are committed."""


class Even(Committer):
    """The masks of a block are spread evenly over its steps, the first of which take what does not divide.

    LLaDA's code (arXiv 2502.09992).
    """

    name: Literal["even"] = "even"

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        return best(scores, even_share(step))


class Ascending(Committer):
    """Steps of ascending size, where the last of a block takes the rest; see `regions.ascending_sizes`.

    ASS (arXiv 2509.23924 and its code). Fixed tokens leave the sizes as they are, so that the end comes sooner.
    """

    name: Literal["ascending"] = "ascending"

    @property
    @override
    def paced(self) -> bool:
        """False: it takes as many steps as the length has."""
        return False

    @override
    def block_steps(self, frame: Frame) -> None:
        """None: as many as it needs.

        Raises:
            InputError: the region is not the one that these steps fill.
        """
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
    """A part of the masks stays, rounded up; at the last step none.

    Dream's code, where the ratio is that of `linear_times`, and the masks are the mean over the batch: here each row's own
    count, so that rows are independent. It may commit nothing at a step, like the code.
    """

    name: Literal["remaining"] = "remaining"
    ratio: Fraction | None = None
    """The part that stays; null: s / t of the two times of the step, as Dream's code."""
    least: Annotated[int, Field(ge=0)] = 0
    """Positions that a step commits at least."""

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        if step.last:
            return step.open
        count = (step.open.sum(1) * (1 - stays(self.ratio, step))).floor().long().clamp(min=self.least)
        return best(scores, count)


class Bernoulli(Committer):
    """Each position is committed by itself with probability 1 - `ratio`, whatever its score; at the last step all.

    `origin` of Dream's code, the reverse process of masked diffusion with ratio s / t.
    """

    name: Literal["bernoulli"] = "bernoulli"
    ratio: Fraction | None = None
    """Probability with which a position stays masked; null: s / t of the two times of the step."""

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        if step.last:
            return step.open
        committed = torch.zeros_like(step.open)
        committed[step.open] = step.uniform("commit") >= stays(self.ratio, step)[step.owner]
        return committed


class Threshold(Committer):
    """All positions whose score reaches a threshold, and the surest one in any case.

    Fast-dLLM (arXiv 2505.22618). diffusers' `BlockRefinementScheduler`, which has `share`, compares with > where this
    has >=; `most` is of TraceLock (arXiv 2605.24697).
    """

    name: Literal["threshold"] = "threshold"
    threshold: NotNegative
    """Score from which on a position is committed."""
    share: bool = False
    """Commit at least what even would, so that a block is full after its steps."""
    most: Count | None = None
    """Positions that a step commits at most for the threshold's sake; null: any number."""

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
    """The n surest, for the largest n whose n-th score is at least 1 - factor / (n + 1); the surest one in any case.

    Fast-dLLM (arXiv 2505.22618). Its code commits the last position of a block too wherever all before it pass: not here.
    """

    name: Literal["factor"] = "factor"
    factor: NotNegative
    """How unsure positions may be that are committed together."""

    @property
    @override
    def paced(self) -> bool:
        """False: it takes as many steps as it needs."""
        return False

    @override
    def __call__(self, step: DecodeStep, scores: Tensor) -> Tensor:
        n = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
        sure = scores.sort(dim=1, descending=True).values >= 1 - self.factor / (n + 1)
        count = torch.where(sure, n, 1.0).amax(1)
        return best(scores, count)


def stays(ratio: Fraction | None, step: DecodeStep) -> Tensor:
    """Ratio (R,) float64 of the masks that stay; where none is given that of `linear_times`."""
    return linear_times(step) if ratio is None else setting(ratio, step)


def linear_times(step: DecodeStep, end: float = 1e-3) -> Tensor:
    """The ratio s / t (R,) float64 of a step: the two times of a linspace from 1 to `end` that it leads from and to.

    Dream's code.
    """
    steps = step.frame.block_steps
    times = torch.linspace(1, end, steps + 1, dtype=torch.float64, device=step.open.device)
    j = min(step.in_block, steps - 1)
    return (times[j + 1] / times[j]).expand(step.row.shape)


def best(scores: Tensor, count: Tensor) -> Tensor:
    """Where (R, W) a score is among the `count` (R,) largest of its row."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    first = torch.arange(scores.shape[1], device=scores.device) < count[:, None]
    return torch.empty_like(first).scatter_(1, order, first)


def even_share(step: DecodeStep) -> Tensor:
    """How many (R,) of a block's masks belong to this of its steps; all at the last and after it."""
    if step.last:
        return torch.full_like(step.block_masks, step.open.shape[1])
    steps = step.frame.block_steps
    # Rounded up at as many first steps as the division leaves over.
    return (step.block_masks + (steps - 1 - step.in_block)) // steps
