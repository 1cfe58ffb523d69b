"""Sets of units that are compared: their means, medians and standard deviations."""

from __future__ import annotations

from flowgrpo.schema.heavy import Tensor, torch


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
