"""Sets of units that are compared: their means, medians and standard deviations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.schema.imports.heavy import Tensor, torch


def set_medians(values: Tensor, comparison: Tensor) -> Tensor:
    """Median (U,) of each unit's set, of an even number the lower of the two middle values; NaN without values."""
    _, index = comparison.unique(dim=0, return_inverse=True)
    medians = values.new_full((int(index.max()) + 1,), torch.nan)
    for i in range(len(medians)):
        members = values[(index == i) & values.isfinite()]
        if len(members):
            medians[i] = members.median()
    return medians[index]


def set_pivots(values: Tensor, comparison: Tensor) -> Tensor:
    """Whether (U,) bool each unit is the pivot of its set: the first whose value is the median."""
    _, index = comparison.unique(dim=0, return_inverse=True)
    middle = (values == set_medians(values, comparison)).nonzero()[:, 0].tolist()
    first = {int(index[unit]): unit for unit in reversed(middle)}
    pivots = torch.zeros(len(values), dtype=torch.bool)
    pivots[list(first.values())] = True
    return pivots


def scaled(
    deviation: Tensor, values: Tensor, comparison: Tensor, *, std: str, eps: float, ddof: int, min_std: float = 0.0
) -> Tensor:
    """Deviations (U,) over a standard deviation of the values, plus `eps`; 0 where that is below `min_std`.

    Args:
        std: `group`, of each set; `global`, of all units; `none`, the deviations stay.
    """
    if std == "none":
        return deviation
    everyone = comparison if std == "group" else torch.zeros(len(values), dtype=torch.long)
    _, count, square = set_statistics(values, everyone)
    spread = torch.sqrt(square / (count - ddof).clamp(min=1))
    # The first also where all are equal and eps is 0.
    return (deviation / (spread + eps)).where((deviation != 0) & (spread >= min_std), 0.0)


def set_statistics(values: Tensor, comparison: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Deviation of each unit from its set's mean (0 where the value is NaN), and its set's count and squared deviations."""
    _, index = comparison.unique(dim=0, return_inverse=True)
    known = values.isfinite()
    zeros = values.new_zeros(int(index.max()) + 1)
    count = zeros.index_add(0, index, known.to(values))
    mean = zeros.index_add(0, index, values.where(known, 0.0)) / count.clamp(min=1)
    deviation = (values - mean[index]).where(known, 0.0)
    # The mean of equal values is off by a rounding error, which a small eps would blow up into an advantage.
    deviation = deviation.where(deviation.abs() > 1e-12 * values.abs(), 0.0)
    square = zeros.index_add(0, index, deviation**2)
    return deviation, count[index], square[index]


@dataclass(frozen=True)
class NestedSets:
    """The L sets that each of U units is in, from the largest to the smallest.

    Attributes:
        members: (U, L, 2) integers; units that are compared with each other by `CreditUnits.comparison` and have equal
            pairs at a level are one set there.
        weight: (U, L) float64 weight of each level; 0 where a unit has no such level.
        kin: (U, K) integers; units that are compared with each other by `CreditUnits.comparison` and have equal rows share
            a part of their noise.
        alike: (U,) float64 covariance of a unit's noise and that of its kin, below 1.
    """

    members: Tensor
    weight: Tensor
    kin: Tensor
    alike: Tensor

    @classmethod
    def joined(cls, parts: Sequence[NestedSets], order: Tensor) -> NestedSets:
        """Those of several processes as one, in an order of all units."""
        names = ("members", "weight", "kin", "alike")
        return cls(*(torch.cat([getattr(part, name) for part in parts])[order] for name in names))

    def compares(self, comparison: Tensor) -> bool:
        """Whether some unit has another one in a set that has a weight; `comparison` as of `CreditUnits`."""
        for level, weight in enumerate(self.weight.unbind(1)):
            own = torch.cat([comparison, self.members[:, level]], 1)[weight > 0]
            if len(own.unique(dim=0)) < len(own):
                return True
        return False


def nested_leave_one_out(
    values: Tensor, comparison: Tensor, nested: NestedSets, *, std: str = "none", eps: float = 1e-4, ddof: int = 0
) -> Tensor:
    """Advantages (U,): sum over levels of w x (value minus the mean of the *others* of the unit's set), w of sum 1.

    The rule is ours. It has as its corners RLOO over the nodes of a depth, and over the children of one state; between
    them lie GiGPO (arXiv 2505.10978) and TEMPO (2509.18314), which add the two but have the unit in its own mean. The
    others' values do not depend on the unit's own noise, so that every level has the exact gradient in expectation, and
    every weighting of them. Where kin share a part of the noise, they take with them the fraction `alike` of it (Stein:
    E[V' xi] = cov(xi', xi) E[dV/dxi]), which their share of the others leaves as a factor; that is divided out.

    Levels without another known unit count for nothing, and the weights of the rest are scaled to the sum 1; a unit that
    is alone at all of them has advantage 0.

    Args:
        values: (U,) float64, NaN where a reward is not known.
        comparison: (U, C) integers, whose first column is the group.
        std: `group` divides by the standard deviation of all values of the group, one for all its depths, since one for
            each depth would weigh the steps; `global` by that of all units.
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
    return scaled(deviation, values, comparison[:, :1], std=std, eps=eps, ddof=ddof)
