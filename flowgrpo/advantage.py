"""Compared with what: from the values of units to advantages, in float64.

Each baseline compares a unit with its set, or with a number that is known beforehand, and scales by a spread:

 - `std="group"`: standard deviation of the unit's own set; `"global"`: of all units; `"none"`: no scaling.
 - `eps` is added to the standard deviation; `ddof` 0 divides by n, 1 by n - 1.

A unit whose value is NaN (its reward was lost or does not apply) enters no statistic and gets advantage 0.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def group_mean(
    values: Tensor, comparison: Tensor, std: str = "group", eps: float = 1e-4, ddof: int = 0, min_std: float = 0.0
) -> Tensor:
    """Advantages (U,): value minus the mean of its set, over the spread. A set of one value, or of equal ones, gives 0.

    Flow-GRPO's code has std global, eps 1e-4, ddof 0; DanceGRPO and MixGRPO have std group, eps 1e-8, ddof 1. BranchGRPO's
    code has those of DanceGRPO and `min_std` 1e-6.

    Args:
        values: (U,) float64.
        comparison: (U,) or (U, C) integers, equal (in all columns) for units of one set.
        min_std: a smaller standard deviation teaches nothing, and gives 0.
    """
    deviation, _, _ = _set_statistics(values, comparison)
    return _scaled(deviation, values, comparison, std, eps, ddof, min_std)


def leave_one_out(values: Tensor, comparison: Tensor, std: str = "none", eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Advantages (U,): value minus the mean of the *others* of its set, n / (n - 1) times the deviation (RLOO, 2402.14740).

    Its baseline does not depend on the unit's own action, so without a std the gradient is unbiased.
    """
    deviation, count, _ = _set_statistics(values, comparison)
    return _scaled(deviation * count / (count - 1).clamp(min=1), values, comparison, std, eps, ddof)


def median(values: Tensor, comparison: Tensor, std: str = "group", eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Advantages (U,): value minus the median of its set, over the spread (MC-GRPO, arXiv 2601.22582).

    One outlier of a small group moves the mean so far that others change their sign, but not the median. A set of odd
    size has its pivot at exactly 0; one of even size has the mean of its two middle values, and no pivot.

    Args:
        std: as for the others, or `mad`: the median of the absolute deviations within the set.
    """
    middle, known = _set_medians(values, comparison), values.isfinite()
    deviation = (values - middle).where(known, 0.0)
    if std == "mad":
        return deviation / (_set_medians(deviation.abs().where(known, torch.nan), comparison) + eps).where(known, 1.0)
    return _scaled(deviation, values, comparison, std, eps, ddof)


def against(values: Tensor, expected: Tensor, std: str = "global", eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Advantages (U,): value minus what was expected of it before it was seen.

    Such a baseline needs no group: a group of equal values still teaches whether they are better than expected.

    Args:
        expected: (U,) float64; see `flowgrpo.history`.
        std: `global` takes the mean of all deviations off and divides by their standard deviation, as SPO
            (arXiv 2509.13232) does; `none` leaves the deviation.
    """
    deviation = values - expected
    return whitened(deviation, eps, ddof) if std == "global" else deviation.nan_to_num()


def whitened(values: Tensor, eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Values (U,) minus their mean, over their standard deviation; 0 where a value is NaN."""
    return group_mean(values, torch.zeros(len(values), dtype=torch.long), "group", eps, ddof)


def combined(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum (U,) of the rewards (U, R) that apply to a unit; NaN where none does."""
    total = (values.nan_to_num() * weights).sum(1)
    return total.where(values.isfinite().any(1), torch.nan)


def zero_std_fraction(values: Tensor, comparison: Tensor) -> float:
    """Fraction of the sets whose values are all equal, and so teach nothing."""
    sets, index = comparison.unique(dim=0, return_inverse=True)
    differing = torch.zeros(len(sets)).index_add(0, index, varied(values, comparison).float())
    return float((differing == 0).float().mean())


def varied(values: Tensor, comparison: Tensor) -> Tensor:
    """Whether (U,) the values of a unit's set differ at all."""
    _, _, square = _set_statistics(values, comparison)
    return square > 0


def _set_medians(values: Tensor, comparison: Tensor) -> Tensor:
    """Median (U,) of each unit's set: the mean of the two middle values where their number is even, NaN without values."""
    _, index = comparison.unique(dim=0, return_inverse=True)
    medians = values.new_full((int(index.max()) + 1,), torch.nan)
    for i in range(len(medians)):
        own = values[(index == i) & values.isfinite()]
        if len(own):
            medians[i] = own.quantile(0.5)
    return medians[index]


def _scaled(
    deviation: Tensor, values: Tensor, comparison: Tensor, std: str, eps: float, ddof: int, min_std: float = 0.0
) -> Tensor:
    if std == "none":
        return deviation
    everyone = comparison if std == "group" else torch.zeros(len(values), dtype=torch.long)
    _, count, square = _set_statistics(values, everyone)
    spread = torch.sqrt(square / (count - ddof).clamp(min=1))
    # The first also where all are equal and eps is 0.
    return (deviation / (spread + eps)).where((deviation != 0) & (spread >= min_std), 0.0)


def _set_statistics(values: Tensor, comparison: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
