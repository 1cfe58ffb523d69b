"""Baselines: what the units of a group are compared with, and the advantages that come of it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice, named
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.comparison_sets import (
    NestedSets,
    nested_leave_one_out,
    scaled,
    set_medians,
    set_pivots,
    set_statistics,
)

NESTED = "algorithm.baseline: credit nested compares with the mean of the others, take leave_one_out"

CAUTION = 0.1  # that of PPO in arXiv 2310.02743


def combined(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum (U,) of the rewards (U, R) that apply to a unit; NaN where no reward applies."""
    total = (values.nan_to_num() * weights).sum(1)
    return total.where(values.isfinite().any(1), torch.nan)


def whitened(values: Tensor, eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Values (U,) minus their mean, over their standard deviation; 0 where a value is NaN."""
    return group_mean(values, torch.zeros(len(values), dtype=torch.long), std="group", eps=eps, ddof=ddof)


class Baseline(Choice):
    """Options of every baseline. Several rewards: `per_reward` is Pref-GRPO's way, `decoupled` GDPO's, over the batch."""

    eps: float = Field(1e-4, ge=0)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 0
    """0 divides its sum of squares by n, 1 by n - 1."""
    clip: float = Field(5.0, gt=0)
    """Advantages are cut to -+ it."""
    scale: float = Field(1.0, gt=0)
    """Advantages are multiplied by it, once they are cut."""
    combine: Literal["sum", "per_reward", "decoupled", "worst", "cautious"] = "sum"
    """Several rewards: sum, compare their weighted sum; per_reward, add advantages of each; decoupled, normalised again;
    worst, compare the smallest of each sample; cautious, their mean minus caution times their variance."""
    caution: float = Field(CAUTION, ge=0)
    """Of cautious: what a unit of variance among a sample's rewards takes off."""
    drop_zero: bool = False
    """Whether edges of advantage 0 leave the update."""

    @model_validator(mode="after")
    def _cautious(self) -> Baseline:
        if self.caution != CAUTION and self.combine != "cautious":
            raise InputError(
                f"algorithm.baseline.caution: {self.combine} has none, take algorithm.baseline.combine=cautious"
            )
        return self

    def advantages(
        self,
        values: Tensor,
        weights: Tensor,
        comparison: Tensor,
        *,
        anchor: Tensor | None = None,
        expected: Tensor | None = None,
        nested: NestedSets | None = None,
    ) -> Tensor:
        """Advantages (U,) of units within their sets.

        Args:
            values: (U, R) float64, a column for each reward; NaN where it does not apply or was lost.
            weights: (R,) of the rewards.
            comparison: (U, C) integers.
            anchor: (U,) multiple of the value that comes on top.
            expected: (U,) the prompt's mean reward before this iteration, NaN if unknown; for baselines that remember.
            nested: sets within the sets; None for none.

        Raises:
            InputError: units of this kind cannot be compared so.
        """

        def relative(column: Tensor) -> Tensor:
            if nested is None:
                return self.relative(column, comparison, expected)
            return self.within(column, comparison, nested)

        total = combined(values, weights)
        if self.combine not in ("per_reward", "decoupled"):  # one number, or one already
            advantages = relative(total)
        else:
            columns = torch.stack([relative(column) for column in values.unbind(1)], 1)
            advantages = columns @ weights
            # What cancels up to a rounding error would be blown up by a later normalisation.
            advantages = advantages.where(advantages.abs() > 1e-12 * (columns.abs() @ weights.abs()), 0.0)
        if self.combine == "decoupled":
            advantages = whitened(advantages.where(total.isfinite(), torch.nan), self.eps, self.ddof)
        if anchor is not None:
            advantages = advantages + anchor * total.nan_to_num()
        return advantages.clamp(-self.clip, self.clip) * self.scale

    @property
    def drops(self) -> str | None:
        """The option for which edges leave the update by their rewards; None where all stay."""
        return "drop_zero" if self.drop_zero else None

    def dropped(self, advantages: Tensor, values: Tensor, comparison: Tensor) -> Tensor:
        """Whether (U,) the edges of each unit leave the update.

        Args:
            advantages, comparison: (U,) and (U, C), as of `advantages`.
            values: (U,) float64, their rewards as one number, NaN for the lost.
        """
        return (advantages == 0) & self.drop_zero

    @abstractmethod
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        """Advantages (U,) of the units by one column of values, before columns are combined; 0 where the value is NaN.

        Args:
            values: (U,) float64, NaN where the reward does not apply or was lost.
            comparison: as of `advantages`.
            expected: as of `advantages`.

        Raises:
            InputError: units of this kind cannot be compared so.
        """

    def within(self, values: Tensor, comparison: Tensor, nested: NestedSets) -> Tensor:
        """Advantages (U,) as of `relative`, of units that are compared in sets within sets.

        Raises:
            InputError: this baseline is not the mean of the others.
        """
        raise InputError(NESTED)


def group_mean(
    values: Tensor, comparison: Tensor, *, std: str = "group", eps: float = 1e-4, ddof: int = 0, min_std: float = 0.0
) -> Tensor:
    """Advantages (U,): value minus the mean of its set, over the spread. A set of one value, or of equal ones, gives 0.

    Flow-GRPO's code has std global, eps 1e-4, ddof 0; DanceGRPO and MixGRPO have std group, eps 1e-8, ddof 1. BranchGRPO's
    code has those of DanceGRPO and `min_std` 1e-6.

    Args:
        values: (U,) float64.
        comparison: (U,) or (U, C) integers, equal (in all columns) for units of one set.
        min_std: sets of a smaller standard deviation have advantage 0.
    """
    deviation, _, _ = set_statistics(values, comparison)
    return scaled(deviation, values, comparison, std=std, eps=eps, ddof=ddof, min_std=min_std)


class GroupMean(Baseline):
    """The mean of the set; advantages are 0 where the standard deviation that divides is below `min_std`."""

    name: Literal["group_mean"] = "group_mean"
    std: Literal["group", "global", "none"] = "group"
    """Standard deviation that divides: of the group, of the whole batch (global), or none."""
    min_std: float = Field(0.0, ge=0)
    """Sets of a smaller standard deviation have advantage 0."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        return group_mean(values, comparison, std=self.std, eps=self.eps, ddof=self.ddof, min_std=self.min_std)


def leave_one_out(values: Tensor, comparison: Tensor, *, std: str = "none", eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Advantages (U,): value minus the mean of the *others* of its set, n / (n - 1) times the deviation (RLOO, 2402.14740).

    Its baseline does not depend on the unit's own action, so without a std the gradient is unbiased.
    """
    deviation, count, _ = set_statistics(values, comparison)
    return scaled(deviation * count / (count - 1).clamp(min=1), values, comparison, std=std, eps=eps, ddof=ddof)


class LeaveOneOut(Baseline):
    """The mean of the others of the set."""

    name: Literal["leave_one_out"] = "leave_one_out"
    std: Literal["group", "global", "none"] = "none"
    """Standard deviation that divides: of the group, of the whole batch (global), or none."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        return leave_one_out(values, comparison, std=self.std, eps=self.eps, ddof=self.ddof)

    @override
    def within(self, values: Tensor, comparison: Tensor, nested: NestedSets) -> Tensor:
        return nested_leave_one_out(values, comparison, nested, std=self.std, eps=self.eps, ddof=self.ddof)


def median(values: Tensor, comparison: Tensor, *, std: str = "group", eps: float = 1e-3, ddof: int = 0) -> Tensor:
    """Advantages (U,): value minus the median of its set, over the spread (MC-GRPO, arXiv 2601.22582).

    One outlier of a small group moves the mean so far that others change their sign, but not the median.

    Args:
        std: as for the others, or `mad`: the median of the absolute deviations within the set.
    """
    known = values.isfinite()
    deviation = (values - set_medians(values, comparison)).where(known, 0.0)
    if std == "mad":
        spread = set_medians(deviation.abs().where(known, torch.nan), comparison)
        return deviation / (spread + eps).where(known, 1.0)
    return scaled(deviation, values, comparison, std=std, eps=eps, ddof=ddof)


class Median(Baseline):
    """The median of the set, by MC-GRPO's code; the sample that is it, the pivot, leaves the update."""

    name: Literal["median"] = "median"
    std: Literal["group", "global", "mad", "none"] = "mad"
    """What divides: mad (the median absolute deviation), the standard deviation of the group or the batch, or nothing."""
    eps: float = Field(1e-3, ge=0)
    """Added to what divides."""
    clip: float = Field(1e9, gt=0)
    """Advantages are cut to -+ it; the code cuts none."""
    drop_pivot: bool = True
    """Whether the pivot, one sample of each group, leaves the update."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        return median(values, comparison, std=self.std, eps=self.eps, ddof=self.ddof)

    @property
    @override
    def drops(self) -> str | None:
        return "drop_pivot" if self.drop_pivot else super().drops

    @override
    def dropped(self, advantages: Tensor, values: Tensor, comparison: Tensor) -> Tensor:
        return super().dropped(advantages, values, comparison) | (set_pivots(values, comparison) & self.drop_pivot)


def against(values: Tensor, expected: Tensor, *, std: str = "global", eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Advantages (U,): value minus the value that was expected before the sample was made.

    Such a baseline needs no group: a group of equal values still teaches whether they are better than expected.

    Args:
        expected: (U,) float64; see `flowgrpo.training.advantages.prompt_statistics`.
        std: `global` takes the mean of all deviations off and divides by their standard deviation, as SPO
            (arXiv 2509.13232) does; `none` leaves the deviation.
    """
    deviation = values - expected
    return whitened(deviation, eps, ddof) if std == "global" else deviation.nan_to_num()


class Tracker(Baseline):
    """What the prompt gave before, in this run (SPO, `train.half_life`); the mean of the others of the set where new."""

    name: Literal["tracker"] = "tracker"
    std: Literal["global", "none"] = "global"
    """Standard deviation that divides: of the batch (global), or none."""

    @model_validator(mode="after")
    def _one_number(self) -> Tracker:
        if self.combine in ("per_reward", "decoupled"):
            raise InputError(
                "algorithm.baseline.combine: tracker remembers one number for each prompt, take sum, worst or cautious"
            )
        return self

    @override
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        if comparison.shape[1] > 1:
            raise InputError("algorithm.baseline: tracker remembers what whole trajectories gave, take credit=terminal")
        others = values - leave_one_out(values, comparison)
        known = others if expected is None else expected.where(expected.isfinite(), others)
        return against(values, known, std=self.std, eps=self.eps, ddof=self.ddof)


class Absolute(Baseline):
    """A number that is given: samples above it are good, those below it bad, whatever the others are."""

    name: Literal["absolute"] = "absolute"
    std: Literal["global", "none"] = "none"
    """Standard deviation that divides: of the batch (global), or none."""
    value: float
    """The reward that samples are compared with."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        deviation = (values - self.value).nan_to_num()
        if self.std == "none":
            return deviation
        spread = values[values.isfinite()].std(correction=self.ddof)
        return deviation / (spread + self.eps)


class Raw(Baseline):
    """Nothing: the reward itself is the advantage, as in reward-weighted regression."""

    name: Literal["none"] = "none"

    @override
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        return values.nan_to_num()


def best(values: Tensor, comparison: Tensor) -> Tensor:
    """Advantages (U,): 1 for the best of a set, all of them where several tie, and 0 for the others and for equal sets."""
    _, index = comparison.unique(dim=0, return_inverse=True)
    known = values.where(values.isfinite(), -torch.inf)
    top = values.new_full((int(index.max()) + 1,), -torch.inf).scatter_reduce(0, index, known, "amax")
    return ((known == top[index]) & values.isfinite() & varied(values, comparison)).to(values)


class Best(Baseline):
    """Only the best of the set is learned from, as in fine-tuning on the best of N samples."""

    name: Literal["best"] = "best"
    drop_zero: bool = True
    """Whether edges of advantage 0, all but those of the best, leave the update."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, expected: Tensor | None) -> Tensor:
        return best(values, comparison)


BASELINES = named(GroupMean, LeaveOneOut, Median, Tracker, Absolute, Raw, Best)


def zero_std_fraction(values: Tensor, comparison: Tensor) -> float:
    """Fraction of the sets whose values are all equal, and so teach nothing."""
    sets, index = comparison.unique(dim=0, return_inverse=True)
    differing = torch.zeros(len(sets)).index_add(0, index, varied(values, comparison).float())
    return float((differing == 0).float().mean())


def varied(values: Tensor, comparison: Tensor) -> Tensor:
    """Whether (U,) the values of a unit's set differ at all."""
    _, _, square = set_statistics(values, comparison)
    return square > 0
