"""How many positions take their token at a step: (step, scores (R, W)) -> (R, W) bool.

Scores are -inf where nothing is open. Of equal scores the first position goes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowgrpo.mdlm.decoding.step import Fraction, Step, setting
from flowgrpo.schema.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")


@dataclass(frozen=True)
class Even:
    """The masks of a block are spread evenly over its steps, the first of which take what does not divide.

    LLaDA's code (arXiv 2502.09992).

    Attributes:
        steps: in one block.
    """

    steps: int

    def __call__(self, step: Step, scores: Tensor) -> Tensor:
        """The surest positions, as many as this step's share."""
        return best(scores, even_share(step, self.steps)) & step.open


@dataclass(frozen=True)
class Ascending:
    """Steps of given sizes, where the last of a block takes the rest; see `flowgrpo.mdlm.decoding.regions.ascending_sizes`.

    ASS (arXiv 2509.23924 and its code). Fixed tokens leave the sizes as they are, so that the end comes sooner.

    Attributes:
        sizes: of the steps of each block.
    """

    sizes: tuple[tuple[int, ...], ...]

    def __call__(self, step: Step, scores: Tensor) -> Tensor:
        """The surest positions, as many as this step's size."""
        sizes = torch.tensor([*self.sizes[step.block][:-1], scores.shape[1]], device=scores.device)
        return best(scores, sizes[step.in_block.clamp(max=len(sizes) - 1)]) & step.open


@dataclass(frozen=True)
class Remaining:
    """A ratio of the masks stays, rounded up; at the last step none.

    Dream's code, where the ratio is that of `LinearTimes`, and the masks are the mean over the batch: here each row's own
    count, so that rows are independent. It may commit nothing at a step, like the code.

    Attributes:
        steps: in one block.
        ratio: of masks that stay.
        least: positions that are committed at least.
    """

    steps: int
    ratio: Fraction
    least: int = 0

    def __call__(self, step: Step, scores: Tensor) -> Tensor:
        """The surest positions, as many as do not stay."""
        masks = step.open.sum(1)
        count = (masks * (1 - setting(self.ratio, step))).floor().long().clamp(min=self.least)
        return best(scores, count.where(step.in_block < self.steps - 1, masks)) & step.open


@dataclass(frozen=True)
class Bernoulli:
    """Each position is committed by itself with probability 1 - ratio, whatever its score; at the last step all.

    `origin` of Dream's code, the reverse process of masked diffusion with ratio s / t.

    Attributes:
        steps: in one block.
        ratio: probability to stay masked.
    """

    steps: int
    ratio: Fraction

    def __call__(self, step: Step, scores: Tensor) -> Tensor:
        """The positions that are drawn."""
        stays = setting(self.ratio, step).where(step.in_block < self.steps - 1, 0.0)
        drawn = torch.zeros_like(step.open)
        drawn[step.open] = step.uniform("commit") >= stays[step.owner]
        return drawn


@dataclass(frozen=True)
class Threshold:
    """All positions whose score reaches a threshold, and the surest one in any case.

    Fast-dLLM (arXiv 2505.22618). With `steps`, at least the share of `Even` is committed, as by diffusers'
    `BlockRefinementScheduler` (which compares with > where this has >=); with `most`, at most so many for the threshold's
    sake, as by TraceLock (arXiv 2605.24697).
    """

    threshold: float
    steps: int | None = None
    most: int | None = None

    def __call__(self, step: Step, scores: Tensor) -> Tensor:
        """The positions that are sure enough."""
        sure = scores >= self.threshold
        if self.most is not None:
            sure &= best(scores, torch.full_like(step.index, self.most))
        share = torch.ones_like(step.index) if self.steps is None else even_share(step, self.steps).clamp(min=1)
        return (sure | best(scores, share)) & step.open


@dataclass(frozen=True)
class Factor:
    """The n surest, for the largest n whose n-th score is at least 1 - factor / (n + 1); the surest one in any case.

    Fast-dLLM (arXiv 2505.22618). Its code commits the last position of a block too wherever all before it pass: not here.
    """

    factor: float = 1.0

    def __call__(self, step: Step, scores: Tensor) -> Tensor:
        """The positions that are sure enough together."""
        n = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
        sure = scores.sort(dim=1, descending=True).values >= 1 - self.factor / (n + 1)
        count = torch.where(sure, n, 1.0).amax(1)
        return best(scores, count) & step.open


@dataclass(frozen=True)
class LinearTimes:
    """The ratio s / t of step j: the two times of a linspace from 1 to `end` that it leads from and to. Dream's code."""

    steps: int
    end: float = 1e-3

    def __call__(self, step: Step) -> Tensor:
        """Ratios (R,) float64."""
        times = torch.linspace(1, self.end, self.steps + 1, dtype=torch.float64, device=step.open.device)
        j = step.in_block.clamp(max=self.steps - 1)
        return times[j + 1] / times[j]


def best(scores: Tensor, count: Tensor) -> Tensor:
    """Where (R, W) a score is among the `count` (R,) largest of its row."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    return torch.zeros_like(order).scatter(1, order, rank) < count[:, None]


def even_share(step: Step, steps: int) -> Tensor:
    """How many (R,) of a block's masks belong to this of its steps; all at the last and after it."""
    share = step.block_masks // steps + (step.in_block < step.block_masks % steps)
    return share.where(step.in_block < steps - 1, step.open.shape[1])
