"""Statistics of sets of compared units: means, medians and standard deviations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.schema.imports.heavy import Tensor, torch


def set_medians(values: Tensor, comparison: Tensor) -> Tensor:
    """Return the median (U,) of each unit's set, the lower one of two; NaN if no value is known."""
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
    """Divide deviations (U,) by the standard deviation of the values plus `eps`; 0 where it is below `min_std`.

    `std` is `group` for each set, `global` for all units, or `none` for no division.
    """
    if std == "none":
        return deviation
    everyone = comparison if std == "group" else torch.zeros(len(values), dtype=torch.long)
    _, count, square = set_statistics(values, everyone)
    spread = torch.sqrt(square / (count - ddof).clamp(min=1))
    # The first condition avoids 0 / 0 for equal values with eps 0.
    return (deviation / (spread + eps)).where((deviation != 0) & (spread >= min_std), 0.0)


def set_statistics(values: Tensor, comparison: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the deviation (U,) of each unit from its set's mean (0 if NaN), and its set's count and sum of squares."""
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
    """The L sets of each of U units, from the largest to the smallest, within one set of `CreditUnits.comparison`."""

    members: Tensor  # (U, L, 2) integers; units with equal pairs at a level form one set there
    weight: Tensor  # (U, L) float64 weight of each level; 0 where a unit has no such level
    kin: Tensor  # (U, K) integers; units with equal rows share a part of their noise
    alike: Tensor  # (U,) float64 covariance of the noises of a unit and its kin, below 1

    @classmethod
    def joined(cls, parts: Sequence[NestedSets], order: Tensor) -> NestedSets:
        """Concatenate the sets of several processes and reorder all units."""
        names = ("members", "weight", "kin", "alike")
        return cls(*(torch.cat([getattr(part, name) for part in parts])[order] for name in names))

    def compares(self, comparison: Tensor) -> bool:
        """Return whether any unit shares a set of positive weight with another one."""
        for level, weight in enumerate(self.weight.unbind(1)):
            sets = torch.cat([comparison, self.members[:, level]], 1)[weight > 0]
            if len(sets.unique(dim=0)) < len(sets):
                return True
        return False


def nested_leave_one_out(
    values: Tensor, comparison: Tensor, nested: NestedSets, *, std: str = "none", eps: float = 1e-4, ddof: int = 0
) -> Tensor:
    """Return advantages (U,): the sum over levels of w x (value minus the mean of the *others* of the set), sum of w = 1.

    The rule is ours. Special cases are RLOO over the nodes of one depth and over the children of one state. GiGPO
    (arXiv 2505.10978) and TEMPO (2509.18314) add the two, but include the unit in its own mean. The others' values are
    independent of the unit's own noise, so every level and every weighting has the exact expected gradient. Kin that
    share a part of the noise reduce it by the fraction `alike` (Stein: E[V' xi] = cov(xi', xi) E[dV/dxi]), times their
    share of the others; the result is divided by the remaining factor.

    Levels without another known unit are skipped, and the other weights rescaled to sum 1; a unit that is alone at all
    levels has advantage 0. `std` group uses the group (first column of `comparison`) for all depths, because one std
    per depth would weigh the steps; `global` uses all units.
    """
    _, kin, _ = set_statistics(values, torch.cat([comparison, nested.kin], 1))
    total, weights = torch.zeros_like(values), torch.zeros_like(values)
    for level in range(nested.weight.shape[1]):
        deviation, count, _ = set_statistics(values, torch.cat([comparison, nested.members[:, level]], 1))
        others = count - 1
        left = 1 - nested.alike * (kin - 1).clamp(min=0) / others.clamp(min=1)
        weight = nested.weight[:, level] * (others > 0)
        total += weight * deviation * count / (others.clamp(min=1) * left)
        weights += weight
    deviation = (total / weights).where(weights > 0, 0.0)
    return divide_by_std(deviation, values, comparison[:, :1], std=std, eps=eps, ddof=ddof)
