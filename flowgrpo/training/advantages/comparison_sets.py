"""Statistics of sets of compared units: means, medians and standard deviations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from flowgrpo.schema.imports.heavy import Tensor, torch


def set_medians(values: Tensor, comparison: Tensor) -> Tensor:
    """Return the median (U,) of each unit's set; NaN if no value is known. Of two middle values it is the lower one."""
    _, index = comparison.unique(dim=0, return_inverse=True)
    medians = values.new_full((int(index.max()) + 1,), torch.nan)
    for i in range(len(medians)):
        members = values[(index == i) & values.isfinite()]
        if len(members):
            medians[i] = members.median()
    return medians[index]


def set_pivots(values: Tensor, comparison: Tensor) -> Tensor:
    """Return a mask (U,) of each set's pivot: its first unit at the median."""
    _, index = comparison.unique(dim=0, return_inverse=True)
    middle = (values == set_medians(values, comparison)).nonzero()[:, 0].tolist()
    first = {int(index[unit]): unit for unit in reversed(middle)}
    pivots = torch.zeros(len(values), dtype=torch.bool)
    pivots[list(first.values())] = True
    return pivots


def divide_by_std(
    deviation: Tensor, values: Tensor, comparison: Tensor, *, std: str, eps: float, ddof: int, min_std: float = 0.0
) -> Tensor:
    """Divide deviations (U,) by the standard deviation of `values` plus `eps`.

    The standard deviation is that of each set (`std` group) or of all units (global); none does not divide. The result
    is 0 where the standard deviation is below `min_std`.
    """
    if std == "none":
        return deviation
    sets = comparison if std == "group" else torch.zeros(len(values), dtype=torch.long)
    _, count, square = set_statistics(values, sets)
    spread = torch.sqrt(square / (count - ddof).clamp(min=1))
    # The first condition avoids 0 / 0 for equal values with eps 0.
    return (deviation / (spread + eps)).where((deviation != 0) & (spread >= min_std), 0.0)


def set_statistics(values: Tensor, comparison: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors (U,): each unit's deviation from its set's mean, and two statistics of its set.

    These are the number of known values and the sum of their squared deviations. The deviation of a NaN value is 0.
    """
    _, index = comparison.unique(dim=0, return_inverse=True)
    known = values.isfinite()
    zeros = values.new_zeros(int(index.max()) + 1)
    count = zeros.index_add(0, index, known.to(values))
    mean = zeros.index_add(0, index, values.where(known, 0.0)) / count.clamp(min=1)
    deviation = (values - mean[index]).where(known, 0.0)
    # A small eps would amplify the rounding error of the mean of equal values.
    deviation = deviation.where(deviation.abs() > 1e-12 * values.abs(), 0.0)
    square = zeros.index_add(0, index, deviation**2)
    return deviation, count[index], square[index]


@dataclass(frozen=True)
class NestedSets:
    """The L nested sets of each of U units, largest first, all within the unit's set of `CreditUnits.comparison`."""

    members: Tensor  # (U, L, 2) integers; units with equal pairs at a level form one set there
    weight: Tensor  # (U, L) float64 weight of each level; 0 where a unit has no such level
    kin: Tensor  # (U, K) integers; units with equal rows are kin, which share a part of their noise
    alike: Tensor  # (U,) float64 covariance between the noise of a unit and of its kin, below 1
    _: KW_ONLY
    growth: float = 0.0  # the k-th different set of a unit, from the largest on, weighs k to this power times as much

    @classmethod
    def concatenate(cls, parts: Sequence[NestedSets], order: Tensor) -> NestedSets:
        """Concatenate the sets of several processes, and reorder the units."""
        names = ("members", "weight", "kin", "alike")
        joined = (torch.cat([getattr(part, name) for part in parts])[order] for name in names)
        return cls(*joined, growth=parts[0].growth)

    def weights(self, comparison: Tensor) -> Tensor:
        """Return the weight (U, L) of each unit's levels: of levels with one set only the last counts, and weights grow."""
        counted, inner = torch.zeros_like(self.weight), torch.zeros(len(comparison), dtype=torch.long)
        for level in reversed(range(self.weight.shape[1])):
            sets = torch.cat([comparison, self.members[:, level]], 1)
            _, index, sizes = sets.unique(dim=0, return_inverse=True, return_counts=True)
            # Sets are nested, so that two of one size are the same.
            new = (self.weight[:, level] > 0) & (sizes[index] > inner)
            counted[:, level] = self.weight[:, level] * new
            inner = sizes[index].where(new, inner)
        return counted * (counted > 0).cumsum(1).clamp(min=1).to(counted) ** self.growth

    def compares(self, comparison: Tensor) -> bool:
        """Return whether any two units share a set of positive weight."""
        for level, weight in enumerate(self.weight.unbind(1)):
            sets = torch.cat([comparison, self.members[:, level]], 1)[weight > 0]
            if len(sets.unique(dim=0)) < len(sets):
                return True
        return False


@dataclass(frozen=True)
class Survival:
    """Which of U units were sampled to the end; the others were stopped by independent draws."""

    weight: Tensor  # (U,) float64; 1 over the unit's chance to go on, 0 if it was stopped
    foretold: Tensor  # (U, R) float64; rewards foretold before the draws, NaN where a reward does not apply

    @classmethod
    def concatenate(cls, parts: Sequence[Survival], order: Tensor) -> Survival:
        """Concatenate the units of several processes, and reorder them."""
        return cls(*(torch.cat([getattr(part, name) for part in parts])[order] for name in ("weight", "foretold")))


def complete(values: Tensor, weight: Tensor, foretold: Tensor) -> Tensor:
    """Return p + w (value - p) for each unit, whose mean over the draws is the value; NaN where a survivor's is lost.

    `weight` w is as in `Survival`; all tensors have the units first. The foretold p only lowers the variance. It is the
    difference estimator of Horvitz and Thompson (J. Am. Stat. Assoc. 47, 1952).
    """
    p = foretold.nan_to_num()
    return torch.where(weight > 0, p + weight * (values - p), foretold)


def weighted_leave_one_out(values: Tensor, comparison: Tensor, weight: Tensor, foretold: Tensor) -> Tensor:
    """Return advantages (U,): value minus an unbiased estimate of the *others'* mean; 0 if stopped, lost or alone.

    The unbiased form of ARRoL (arXiv 2603.24840) is ours. The loss of a survivor must be multiplied by its weight 1 / q.
    Draws of different units are independent, so E[w_i w_j] = 1, and the expected gradient over the draws is that of
    `leave_one_out` of all units, whatever q and whatever was foretold. The mean of the survivors alone is biased.
    `weight` and `foretold` (U,) are as in `Survival`.
    """
    estimates = complete(values, weight, foretold.nan_to_num())
    deviation, count, _ = set_statistics(estimates, comparison)
    others = (estimates - deviation * count / (count - 1).clamp(min=1)).where(count > 1, values)
    found = values - others
    found = found.where(found.abs() > 1e-12 * estimates.abs(), 0.0)  # as in `set_statistics`
    return found.where((weight > 0) & values.isfinite(), 0.0)


def nested_leave_one_out(
    values: Tensor, comparison: Tensor, nested: NestedSets, *, std: str = "none", eps: float = 1e-4, ddof: int = 0
) -> Tensor:
    """Return advantages (U,): the sum over levels of w x (value minus the mean of the *others* of the set), sum of w = 1.

    The rule is ours. Special cases are RLOO over the nodes of one depth and RLOO over the children of one state. GiGPO
    (arXiv 2505.10978) and TEMPO (2509.18314) add these two, but include the unit in its own mean.

    The others' values are independent of the unit's own noise, so the expected gradient is exact at every level and for
    all weights. Kin are the exception, since they share a part of the noise. They reduce the expected gradient by the
    fraction `alike` (Stein: E[V' xi] = cov(xi', xi) E[dV/dxi]) times their share of the others. The result is divided
    by 1 minus this product.

    Levels with one set count once. A level without another known unit is skipped, and the other weights are rescaled to
    sum 1. A unit that is alone at all levels has advantage 0. `std` group takes the group (first column of `comparison`)
    at all depths, because one std per depth would weigh some steps more than others. `std` global takes all units.
    """
    _, kin, _ = set_statistics(values, torch.cat([comparison, nested.kin], 1))

    def share(others: Tensor) -> Tensor:
        """Return the factor (U,) from the deviation from the mean of all to that from the mean of the others."""
        left = 1 - nested.alike * (kin - 1).clamp(min=0) / others.clamp(min=1)
        return (others + 1) / (others.clamp(min=1) * left)

    return _over_levels(values, comparison, nested, share, std=std, eps=eps, ddof=ddof)


def nested_mean(
    values: Tensor, comparison: Tensor, nested: NestedSets, *, std: str = "group", eps: float = 1e-4, ddof: int = 0
) -> Tensor:
    """Return advantages (U,) as `nested_leave_one_out` does, with means that include the unit itself.

    GiGPO (arXiv 2505.10978) and TEMPO (2509.18314, *reconstructed*) add deviations of this kind, HGPO (2602.22817) and
    TreePO (2508.17445) take their weighted mean.
    """
    return _over_levels(values, comparison, nested, torch.ones_like, std=std, eps=eps, ddof=ddof)


def _over_levels(
    values: Tensor,
    comparison: Tensor,
    nested: NestedSets,
    factor: Callable[[Tensor], Tensor],
    *,
    std: str,
    eps: float,
    ddof: int,
) -> Tensor:
    """Return advantages (U,): the weighted mean over levels of the deviation from the set's mean times `factor`.

    `factor` takes the number (U,) of others in the set. Weights are those of `NestedSets.weights`.
    A level without another known unit is skipped; 0 for a unit that is alone at all levels.
    """
    total, weights = torch.zeros_like(values), torch.zeros_like(values)
    for level, counted in enumerate(nested.weights(comparison).unbind(1)):
        deviation, count, _ = set_statistics(values, torch.cat([comparison, nested.members[:, level]], 1))
        weight = counted * (count > 1)
        total += weight * deviation * factor(count - 1)
        weights += weight
    deviation = (total / weights).where(weights > 0, 0.0)
    return divide_by_std(deviation, values, comparison[:, :1], std=std, eps=eps, ddof=ddof)
