"""Sets of units that are compared: their means, medians and standard deviations."""

from __future__ import annotations

from flowgrpo.schema.heavy import Tensor, torch


def set_medians(values: Tensor, comparison: Tensor) -> tuple[Tensor, Tensor]:
    """Median (U,) of each unit's set, NaN without values, and whether (U,) a unit is its pivot, the first to have it.

    Of an even number the median is the lower of the two middle values, as `torch.median` has it.
    """
    _, index = comparison.unique(dim=0, return_inverse=True)
    medians, pivots = torch.full_like(values, torch.nan), torch.zeros(len(values), dtype=torch.bool)
    for i in range(int(index.max()) + 1):
        members = ((index == i) & values.isfinite()).nonzero()[:, 0]
        if len(members):
            middle = values[members].median()
            medians[index == i] = middle
            pivots[members[values[members] == middle][0]] = True
    return medians, pivots


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
