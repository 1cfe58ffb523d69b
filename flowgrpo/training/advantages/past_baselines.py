"""Baselines that compare with the rewards of earlier iterations, and the names of all baselines."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import named
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.baseline import (
    Absolute,
    Baseline,
    Best,
    Beta,
    GroupMean,
    LeaveOneOut,
    Median,
    Raw,
    leave_one_out,
    standardize,
)
from flowgrpo.training.advantages.comparison_sets import set_statistics
from flowgrpo.training.advantages.past_rewards import PastRewards


class PastBaseline(Baseline):
    """Base class of baselines that compare with earlier rewards. They remember one number for each trajectory."""

    @model_validator(mode="after")
    def _one_number(self) -> PastBaseline:
        if self.combine in ("per_reward", "decoupled"):
            raise InputError(
                f"algorithm.baseline.combine: {self.name} remembers one number for each prompt, take sum, worst or cautious"
            )
        return self

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        if comparison.shape[1] > 1:
            raise InputError(
                f"algorithm.baseline: {self.name} remembers what whole trajectories gave, take credit=terminal"
            )
        return self.relative_to_past(values, comparison, past)

    @abstractmethod
    def relative_to_past(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        """Return the advantages (U,) of trajectories; see `Baseline.relative`."""


class Tracker(PastBaseline):
    """Baseline that subtracts the prompt's mean reward so far in this run (SPO, arXiv 2509.13232).

    For a prompt without earlier rewards it is leave-one-out. A group of equal rewards still has a signal: whether they
    are better than expected. With std `global`, the mean of all deviations is subtracted as well, as in SPO.
    """

    name: Literal["tracker"] = "tracker"
    std: Literal["global", "none"] = "global"
    """Standard deviation that divides: of the batch (global), or none."""

    @override
    def relative_to_past(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        others = values - leave_one_out(values, comparison)
        known = others if past is None else past.mean.where(past.mean.isfinite(), others)
        deviation = values - known
        return standardize(deviation, self.eps, self.ddof) if self.std == "global" else deviation.nan_to_num()


def move_quantiles(quantiles: Sequence[float], levels: Sequence[float], values: Tensor, rate: float) -> list[float]:
    """Return estimates of the quantiles at rising `levels` after values (B,), NaN where lost; they rise, too.

    Each moves by q <- q + rate x std x (level - fraction of values below q), with the std of the values. Without earlier
    estimates, the quantiles of the values are returned; none if there are no values. RiskPO (arXiv 2510.00911) tracks
    rewards of a known scale, without the std.
    """
    values = values[values.isfinite()]
    if not len(values):
        return list(quantiles)
    if not quantiles:
        return values.quantile(values.new_tensor(levels)).tolist()
    step, moved, least = rate * float(values.std(correction=0)), [], -math.inf
    for level, quantile in zip(levels, quantiles, strict=True):
        least = max(least, quantile + step * (level - float((values < quantile).to(values).mean())))
        moved.append(least)
    return moved


def mixed_utility(values: Tensor, low: float, high: float, *, levels: Sequence[float], weight: float) -> Tensor:
    """Return the utility (U,) of values (U,) by which RiskPO (arXiv 2510.00911, code) raises a mixed value at risk.

    This is the mean of the values between the quantiles `low` and `high`, at levels a and b, and `weight` times the mean
    of those below, over 1 + weight. Its derivative is that of the mean utility with the quantiles held fixed.

    The utility of s is [-weight (low - s)+ / a + ((s - low)+ - (s - high)+) / (b - a)] / (1 + weight). Its slope is weight
    / (a (1 + weight)) below `low`, 1 / ((b - a) (1 + weight)) up to `high`, and 0 above.
    """
    worst = (low - values).clamp(min=0) / levels[0]
    middle = ((values - low).clamp(min=0) - (values - high).clamp(min=0)) / (levels[1] - levels[0])
    return (middle - weight * worst) / (1 + weight)


class Quantile(PastBaseline):
    """Baseline that weighs rewards by where they stand among those of all prompts (RiskPO, arXiv 2510.00911).

    Advantages are differences of a utility, see `mixed_utility`, from the mean utility of the others of the group: bad
    samples weigh more, and samples above the upper quantile are alike. The quantiles are those before this iteration; the
    first iteration takes its own. Departures from the paper's code: samples are not joined into bundles of prompts, since
    continuous rewards need none, and their utility is compared within the group.
    """

    name: Literal["quantile"] = "quantile"
    levels: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.2, 0.8]
    """Levels of the lower and the upper quantile."""
    weight: float = Field(1.5, ge=0)
    """Weight of the mean of the samples below the lower quantile; that of those between has weight 1."""
    rate: float = Field(0.1, gt=0, le=1)
    """Step of the tracked quantiles in an iteration, in standard deviations of its rewards."""
    std: Literal["global", "none"] = "global"
    """Standard deviation of the utilities that divides: of the batch (global), or none. That of a group would undo the
    weights."""

    @model_validator(mode="after")
    def _rising(self) -> Quantile:
        if self.levels[0] >= self.levels[1]:
            raise InputError(f"algorithm.baseline.levels: {self.levels} are not in ascending order; take [0.2, 0.8]")
        return self

    @override
    def remember(self, memory: Sequence[float], totals: Tensor) -> list[float]:
        return move_quantiles(memory, self.levels, totals, self.rate)

    @override
    def relative_to_past(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        known = past.memory if past is not None and past.memory else self.remember([], values)
        if not known:
            return torch.zeros_like(values)
        utility = mixed_utility(values, *known, levels=self.levels, weight=self.weight)
        return leave_one_out(utility, comparison, std=self.std, eps=self.eps, ddof=self.ddof)


class Cumulative(PastBaseline):
    """Baseline that smooths the group's standardised rewards by those of all that the prompt gave (DCPO, 2509.02333).

    With A the reward standardised by this visit's group, B by all rewards of the prompt, and n the number of all its
    rewards over that of this visit, the advantage is the smaller in size of ((n - 1) A + B) / n and (A + (n - 1) B) / n. A
    group of equal rewards has a signal at later visits. The first visit has A.

    The paper's n is the number of visits, which this is if groups are of one size and nothing is forgotten. Here rewards of
    earlier policies count less, see `train.half_life`.
    """

    name: Literal["cumulative"] = "cumulative"

    @override
    def relative_to_past(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        deviation, count, square = set_statistics(values, comparison)
        fresh = self._standardized(deviation, square, count)
        if past is None:
            return fresh
        gap = (values - deviation - past.mean).nan_to_num()  # of the group's mean from the prompt's earlier one
        total = (past.count + count).clamp(min=1)
        whole = deviation + gap * past.count / total
        whole = whole.where(whole.abs() > 1e-12 * values.abs(), 0.0)  # as in `set_statistics`
        every = self._standardized(whole, square + past.square + gap**2 * past.count * count / total, total)
        share = count / total  # 1 / n
        smoothed = torch.stack([(1 - share) * fresh + share * every, share * fresh + (1 - share) * every])
        return smoothed.gather(0, smoothed.abs().argmin(0, keepdim=True))[0]

    def _standardized(self, deviation: Tensor, square: Tensor, count: Tensor) -> Tensor:
        spread = torch.sqrt(square / (count - self.ddof).clamp(min=1))
        return (deviation / (spread + self.eps)).where(deviation != 0, 0.0)


BASELINES = named(GroupMean, LeaveOneOut, Median, Beta, Tracker, Cumulative, Quantile, Absolute, Raw, Best)
