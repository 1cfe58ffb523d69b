"""Compared with what?"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from pydantic import Field, model_validator

from flowgrpo import advantage
from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice

Tensor = torch.Tensor


class Baseline(Choice):
    """Options of every baseline.

    `combine` says how several rewards become one advantage: `sum` compares their weighted sum; `per_reward` compares each by
    itself and adds the advantages by weight (Pref-GRPO); `decoupled` also normalises that over the batch (GDPO).
    """

    eps: float = Field(1e-4, ge=0)
    ddof: Literal[0, 1] = 0
    clip: float = Field(5.0, gt=0)
    combine: Literal["sum", "per_reward", "decoupled"] = "sum"
    drop_zero: bool = False  # whether edges of advantage 0 leave the update

    def advantages(
        self,
        values: Tensor,
        weights: Tensor,
        comparison: Tensor,
        anchor: Tensor | None = None,
        expected: Tensor | None = None,
    ) -> Tensor:
        """Advantages (U,) of units within their sets.

        Args:
            values: (U, R) float64, a column for each reward; NaN where it does not apply or was lost.
            weights: (R,) of the rewards.
            comparison: (U, C) integers.
            anchor: (U,) multiple of the value that comes on top.
            expected: (U,) the prompt's mean reward before this iteration, NaN if unknown; for baselines that remember.
        """
        total = advantage.combined(values, weights)
        if self.combine == "sum":
            found = self.relative(total, comparison, expected)
        else:
            columns = torch.stack([self.relative(column, comparison, expected) for column in values.unbind(1)], 1)
            found = columns @ weights
            # What cancels up to a rounding error would be blown up by a later normalisation.
            found = found.where(found.abs() > 1e-12 * (columns.abs() @ weights.abs()), 0.0)
        if self.combine == "decoupled":
            found = advantage.whitened(found.where(total.isfinite(), torch.nan), self.eps, self.ddof)
        if anchor is not None:
            found = found + anchor * total.nan_to_num()
        return found.clamp(-self.clip, self.clip)

    @abstractmethod
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        """Advantages (U,) of one column of values (U,)."""


class GroupMean(Baseline):
    """The mean of the set. Where the standard deviation that divides is below `min_std`, nothing is learnt."""

    name: Literal["group_mean"] = "group_mean"
    std: Literal["group", "global", "none"] = "group"
    min_std: float = Field(0.0, ge=0)

    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        """Advantages (U,) of one column of values (U,)."""
        return advantage.group_mean(values, comparison, self.std, self.eps, self.ddof, self.min_std)


class LeaveOneOut(Baseline):
    """The mean of the others of the set."""

    name: Literal["leave_one_out"] = "leave_one_out"
    std: Literal["group", "global", "none"] = "none"

    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        """Advantages (U,) of one column of values (U,)."""
        return advantage.leave_one_out(values, comparison, self.std, self.eps, self.ddof)


class Median(Baseline):
    """The median of the set; the sample that is it, the pivot of an odd group, leaves the update."""

    name: Literal["median"] = "median"
    std: Literal["group", "global", "mad", "none"] = "mad"
    drop_zero: bool = True

    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        """Advantages (U,) of one column of values (U,)."""
        return advantage.median(values, comparison, self.std, self.eps, self.ddof)


class Tracker(Baseline):
    """What the prompt gave before, in this run; the mean of the others of the set where it is new (SPO, `train.memory`)."""

    name: Literal["tracker"] = "tracker"
    std: Literal["global", "none"] = "global"

    @model_validator(mode="after")
    def _one_number(self) -> Tracker:
        if self.combine != "sum":
            raise InputError("algorithm.baseline.combine: tracker remembers one number for each prompt, take sum")
        return self

    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        """Advantages (U,) of one column of values (U,)."""
        if comparison.shape[1] > 1:
            raise InputError("algorithm.baseline: tracker remembers what whole trajectories gave, take credit=terminal")
        others = values - advantage.leave_one_out(values, comparison)
        known = others if expected is None else expected.where(expected.isfinite(), others)
        return advantage.against(values, known, self.std, self.eps, self.ddof)


class Absolute(Baseline):
    """A number that is given: samples above it are good, those below it bad, whatever the others are."""

    name: Literal["absolute"] = "absolute"
    std: Literal["global", "none"] = "none"
    value: float

    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        """Advantages (U,) of one column of values (U,)."""
        deviation = (values - self.value).nan_to_num()
        if self.std == "none":
            return deviation
        spread = values[values.isfinite()].std(correction=self.ddof)
        return deviation / (spread + self.eps)
