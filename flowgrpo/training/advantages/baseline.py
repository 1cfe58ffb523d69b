"""Baselines: they map the rewards of compared units to advantages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.comparison_sets import (
    NestedSets,
    Survival,
    divide_by_std,
    nested_leave_one_out,
    nested_mean,
    set_medians,
    set_pivots,
    set_statistics,
    weighted_leave_one_out,
)
from flowgrpo.training.advantages.past_rewards import PastRewards

STOPPED = "algorithm.baseline: algorithm.tree.stop is without bias by leave_one_out with std: none alone, take that"
NESTED = "algorithm.baseline: credit nested compares with means, take leave_one_out, or for texts group_mean"

CAUTION = 0.1  # the value in arXiv 2310.02743 for PPO


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum (U,) of each unit's rewards (U, R). NaN rewards are skipped; NaN if all are NaN."""
    total = (values.nan_to_num() * weights).sum(1)
    return total.where(values.isfinite().any(1), torch.nan)


def standardize(values: Tensor, eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Return values (U,) minus their mean, divided by their standard deviation; 0 where a value is NaN."""
    return group_mean(values, torch.zeros(len(values), dtype=torch.long), std="group", eps=eps, ddof=ddof)


class Baseline(Choice):
    """Base class of baselines, with their common options.

    For several rewards, `combine` per_reward follows Pref-GRPO and decoupled follows GDPO.
    """

    eps: float = Field(1e-4, ge=0)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 0
    """The standard deviation divides its sum of squares by n - ddof."""
    clip: float = Field(5.0, gt=0)
    """Advantages are clipped to at most this size."""
    scale: float = Field(1.0, gt=0)
    """Factor of the advantages, after the clip."""
    combine: Literal["sum", "per_reward", "decoupled", "worst", "cautious"] = "sum"
    """How several rewards are combined. sum: compare their weighted sum; per_reward: add the advantages of each;
    decoupled: the same, normalised again; worst: compare the smallest of each sample; cautious: compare their mean
    minus caution times their variance."""
    caution: float = Field(CAUTION, ge=0)
    """Factor of the variance of a sample's rewards, for cautious."""
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
        past: PastRewards | None = None,
        nested: NestedSets | None = None,
        survival: Survival | None = None,
    ) -> Tensor:
        """Return the advantages (U,) of units. Raises InputError if this baseline cannot compare units of this kind.

        Args:
            values: (U, R) float64, one column per reward; NaN where a reward does not apply or was lost.
            weights: (R,) weights of the rewards.
            comparison: (U, C) integers; units with equal rows form one set.
            anchor: (U,) coefficients; coefficient x total reward is added to the advantage.
            past: rewards of earlier iterations; None if there are none.
            nested: smaller sets within those of `comparison`.
            survival: which units were sampled to the end; None: all. No other units have values.
        """

        def relative(column: Tensor, foretold: Tensor | None) -> Tensor:
            if survival is not None and foretold is not None:
                return self.among_survivors(column, comparison, survival.weight, foretold)
            if nested is None:
                return self.relative(column, comparison, past)
            return self.within(column, comparison, nested)

        total = weighted_sum(values, weights)
        if self.combine not in ("per_reward", "decoupled"):  # the others compare one number per unit
            advantages = relative(total, None if survival is None else weighted_sum(survival.foretold, weights))
        else:
            foretold = [None] * len(weights) if survival is None else survival.foretold.unbind(1)
            columns = torch.stack([relative(*each) for each in zip(values.unbind(1), foretold, strict=True)], 1)
            advantages = columns @ weights
            # A later normalisation would amplify rounding errors of sums that cancel.
            advantages = advantages.where(advantages.abs() > 1e-12 * (columns.abs() @ weights.abs()), 0.0)
        if self.combine == "decoupled":
            advantages = standardize(advantages.where(total.isfinite(), torch.nan), self.eps, self.ddof)
        if anchor is not None:
            advantages = advantages + anchor * total.nan_to_num()
        return advantages.clamp(-self.clip, self.clip) * self.scale

    @property
    def drops(self) -> str | None:
        """Return the name of the active option that drops edges from the update; None if none is active."""
        return "drop_zero" if self.drop_zero else None

    def drop_mask(self, advantages: Tensor, values: Tensor, comparison: Tensor) -> Tensor:
        """Return a mask (U,) of units whose edges leave the update; `values` (U,) are total rewards, NaN if lost."""
        return (advantages == 0) & self.drop_zero

    def remember(self, memory: Sequence[float], totals: Tensor) -> list[float]:
        """Return what this baseline remembers of all rewards, after the total rewards (B,) of an iteration; here nothing."""
        return []

    @abstractmethod
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        """Return the advantages (U,) for one column of values (U,), NaN where lost; see `advantages`."""

    def within(self, values: Tensor, comparison: Tensor, nested: NestedSets) -> Tensor:
        """Return the advantages (U,) of units in nested sets. Raises InputError if this baseline does not take a mean."""
        raise InputError(NESTED)

    def among_survivors(self, values: Tensor, comparison: Tensor, weight: Tensor, foretold: Tensor) -> Tensor:
        """Return `weighted_leave_one_out` of units. Raises InputError if this baseline is not leave-one-out."""
        raise InputError(STOPPED)


def group_mean(
    values: Tensor, comparison: Tensor, *, std: str = "group", eps: float = 1e-4, ddof: int = 0, min_std: float = 0.0
) -> Tensor:
    """Return advantages (U,): value minus its set's mean, divided by the standard deviation; 0 if that is below `min_std`.

    It is the baseline of GRPO (arXiv 2402.03300). Flow-GRPO's code uses std global, eps 1e-4, ddof 0. DanceGRPO and MixGRPO
    use std group, eps 1e-8, ddof 1, and BranchGRPO's code adds `min_std` 1e-6.
    """
    deviation, _, _ = set_statistics(values, comparison)
    return divide_by_std(deviation, values, comparison, std=std, eps=eps, ddof=ddof, min_std=min_std)


class GroupMean(Baseline):
    """Baseline that subtracts the mean of the set."""

    name: Literal["group_mean"] = "group_mean"
    std: Literal["group", "global", "none"] = "group"
    """Standard deviation that divides: of the group, of the whole batch (global), or none."""
    min_std: float = Field(0.0, ge=0)
    """Sets of a smaller standard deviation have advantage 0."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        return group_mean(values, comparison, std=self.std, eps=self.eps, ddof=self.ddof, min_std=self.min_std)

    @override
    def within(self, values: Tensor, comparison: Tensor, nested: NestedSets) -> Tensor:
        return nested_mean(values, comparison, nested, std=self.std, eps=self.eps, ddof=self.ddof)


def leave_one_out(values: Tensor, comparison: Tensor, *, std: str = "none", eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Return advantages (U,): value minus the mean of the *others* of its set (RLOO, 2402.14740).

    This is n / (n - 1) times the deviation. The baseline is independent of the unit's own action, so without a std the
    gradient is unbiased.
    """
    deviation, count, _ = set_statistics(values, comparison)
    return divide_by_std(deviation * count / (count - 1).clamp(min=1), values, comparison, std=std, eps=eps, ddof=ddof)


class LeaveOneOut(Baseline):
    """Baseline that subtracts the mean of the other units of the set."""

    name: Literal["leave_one_out"] = "leave_one_out"
    std: Literal["group", "global", "none"] = "none"
    """Standard deviation that divides: of the group, of the whole batch (global), or none."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        return leave_one_out(values, comparison, std=self.std, eps=self.eps, ddof=self.ddof)

    @override
    def within(self, values: Tensor, comparison: Tensor, nested: NestedSets) -> Tensor:
        return nested_leave_one_out(values, comparison, nested, std=self.std, eps=self.eps, ddof=self.ddof)

    @override
    def among_survivors(self, values: Tensor, comparison: Tensor, weight: Tensor, foretold: Tensor) -> Tensor:
        return weighted_leave_one_out(values, comparison, weight, foretold)


class Median(Baseline):
    """Baseline that subtracts the median of the set, as MC-GRPO's code does (arXiv 2601.22582).

    In a small group, one outlier can change the sign of other advantages by shifting the mean; it hardly shifts the
    median. The sample at the median, the pivot, is dropped by default.
    """

    name: Literal["median"] = "median"
    std: Literal["group", "global", "mad", "none"] = "mad"
    """The divisor: mad (the median absolute deviation), the standard deviation of the group or the batch (global), or
    none."""
    eps: float = Field(1e-3, ge=0)
    """Added to the divisor."""
    clip: float = Field(1e9, gt=0)
    """Advantages are clipped to at most this size; the paper's code clips none."""
    drop_pivot: bool = True
    """Whether the pivot, one sample of each group, leaves the update."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        known = values.isfinite()
        deviation = (values - set_medians(values, comparison)).where(known, 0.0)
        if self.std == "mad":
            spread = set_medians(deviation.abs().where(known, torch.nan), comparison)
            return deviation / (spread + self.eps).where(known, 1.0)
        return divide_by_std(deviation, values, comparison, std=self.std, eps=self.eps, ddof=self.ddof)

    @property
    @override
    def drops(self) -> str | None:
        return "drop_pivot" if self.drop_pivot else super().drops

    @override
    def drop_mask(self, advantages: Tensor, values: Tensor, comparison: Tensor) -> Tensor:
        return super().drop_mask(advantages, values, comparison) | (set_pivots(values, comparison) & self.drop_pivot)


def beta_weights(p: Tensor) -> Tensor:
    """Return weights (S,) of sets with success rates `p` (S,): 1 over the density of a Beta distribution at p, at most 1e6.

    Its parameters are 1 + a/3 and 1 + b/3, at least 1, as in the code of BNPO (arXiv 2506.02864); a and b are those of the
    Beta distribution with the mean and the variance (n - 1) of all `p`. All weights are 1 if the standard deviation of `p`
    is below 1e-6, where float64 is too coarse for the density, or if there is only one p.
    """
    mean = p.mean()
    variance = p.var() if len(p) > 1 else p.new_zeros(())
    if variance < 1e-12:
        return torch.ones_like(p)
    mass = mean * (1 - mean) / variance - 1
    alpha, beta = (1 + mass * mean / 3).clamp(min=1), (1 + mass * (1 - mean) / 3).clamp(min=1)
    density = torch.xlogy(alpha - 1, p) + torch.xlogy(beta - 1, 1 - p)
    scale = alpha.lgamma() + beta.lgamma() - (alpha + beta).lgamma()
    return (scale - density).exp().clamp(max=1e6)


class Beta(Baseline):
    """Baseline that subtracts the mean p of the set and divides by a Beta density at p (BNPO, arXiv 2506.02864).

    Rewards are mapped from [`worst`, `best`] to [0, 1] first. The density is fitted to the p of all sets, see
    `beta_weights`. With both parameters 1 it is 1; with both 3/2 it is proportional to the standard deviation of a binary
    reward. The means of continuous rewards vary little between sets, so that the density is narrow and weights of a few sets
    reach 1e6. So `bound` is on by default; the paper's code has none.
    """

    name: Literal["beta"] = "beta"
    worst: float = 0.0
    """The reward that counts as 0. Means of sets below it count as 0, too."""
    best: float = 1.0
    """The reward that counts as 1. Means of sets above it count as 1, too."""
    bound: float | None = Field(5.0, ge=1)
    """Weights are cut to between 1 / bound and bound, then rescaled to mean 1 over the units that are not all equal; null:
    as in the paper's code."""

    @model_validator(mode="after")
    def _ordered(self) -> Beta:
        if self.best <= self.worst:
            raise InputError(
                f"algorithm.baseline.best: {self.best} is not above algorithm.baseline.worst = {self.worst}"
            )
        return self

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        solved = (values - self.worst) / (self.best - self.worst)
        deviation, _, square = set_statistics(solved, comparison)
        _, index = comparison.unique(dim=0, return_inverse=True)
        known = solved.isfinite()
        means = solved.new_full((int(index.max()) + 1,), -torch.inf)
        means = means.scatter_reduce(0, index[known], (solved - deviation)[known].clamp(0, 1), "amax")
        weights, found = torch.ones_like(means), means.isfinite()
        weights[found] = beta_weights(means[found])
        weight, varied = weights[index], known & (square > 0)
        if self.bound is not None:
            weight = weight.clamp(1 / self.bound, self.bound)
            weight = weight / weight[varied].mean() if varied.any() else weight
        return deviation * weight.where(varied, 0.0)


class Absolute(Baseline):
    """Baseline that subtracts a given number."""

    name: Literal["absolute"] = "absolute"
    std: Literal["global", "none"] = "none"
    """Standard deviation that divides: of the batch (global), or none."""
    value: float
    """The reward that samples are compared with."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        deviation = (values - self.value).nan_to_num()
        if self.std == "none":
            return deviation
        return deviation / (values[values.isfinite()].std(correction=self.ddof) + self.eps)


class Raw(Baseline):
    """No baseline: the reward itself is the advantage, as in reward-weighted regression."""

    name: Literal["none"] = "none"

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        return values.nan_to_num()


class Best(Baseline):
    """Advantage 1 for the best units of a set, ties included, and 0 for the others; all 0 in a set of equal rewards."""

    name: Literal["best"] = "best"
    drop_zero: bool = True
    """Whether edges of advantage 0, all but those of the best, leave the update."""

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        _, index = comparison.unique(dim=0, return_inverse=True)
        known = values.where(values.isfinite(), -torch.inf)
        top = values.new_full((int(index.max()) + 1,), -torch.inf).scatter_reduce(0, index, known, "amax")
        return ((known == top[index]) & values.isfinite() & has_spread(values, comparison)).to(values)


def zero_std_fraction(values: Tensor, comparison: Tensor) -> float:
    """Return the fraction of sets whose values are all equal, so that they give no gradient; 1 if no set has two members.

    Sets of one member do not count: the start of a tree that splits later is compared with no other.
    """
    sets, index, sizes = comparison.unique(dim=0, return_inverse=True, return_counts=True)
    differing = torch.zeros(len(sets)).index_add(0, index, has_spread(values, comparison).float())
    equal = (differing == 0)[sizes > 1]
    return float(equal.float().mean()) if len(equal) else 1.0


def has_spread(values: Tensor, comparison: Tensor) -> Tensor:
    """Return a mask (U,) of units whose set holds at least two different values."""
    _, _, square = set_statistics(values, comparison)
    return square > 0
