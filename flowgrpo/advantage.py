"""Compared with what: from the values of units to advantages, in float64.

Both baselines compare a unit with its set and scale by a spread:

 - `std="group"`: standard deviation of the unit's own set; `"global"`: of all units; `"none"`: no scaling.
 - `eps` is added to the standard deviation; `ddof` 0 divides by n, 1 by n - 1.

A unit whose value is NaN (its reward was lost or does not apply) enters no statistic and gets advantage 0.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def group_mean(values: Tensor, comparison: Tensor, std: str = "group", eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Advantages (U,): value minus the mean of its set, over the spread. A set of one value, or of equal ones, gives 0.

    Flow-GRPO's code has std global, eps 1e-4, ddof 0; DanceGRPO and MixGRPO have std group, eps 1e-8, ddof 1.

    Args:
        values: (U,) float64.
        comparison: (U,) or (U, C) integers, equal (in all columns) for units of one set.
    """
    deviation, _, _ = _set_statistics(values, comparison)
    return _scaled(deviation, values, comparison, std, eps, ddof)


def leave_one_out(values: Tensor, comparison: Tensor, std: str = "none", eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Advantages (U,): value minus the mean of the *others* of its set, n / (n - 1) times the deviation (RLOO, 2402.14740).

    Its baseline does not depend on the unit's own action, so without a std the gradient is unbiased.
    """
    deviation, count, _ = _set_statistics(values, comparison)
    return _scaled(deviation * count / (count - 1).clamp(min=1), values, comparison, std, eps, ddof)


def combined(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum (U,) of the rewards (U, R) that apply to a unit; NaN where none does."""
    total = (values.nan_to_num() * weights).sum(1)
    return total.where(values.isfinite().any(1), torch.nan)


def zero_std_fraction(values: Tensor, comparison: Tensor) -> float:
    """Fraction of the sets whose values are all equal, and so teach nothing."""
    _, _, square = _set_statistics(values, comparison)
    sets, index = comparison.unique(dim=0, return_inverse=True)
    varied = torch.zeros(len(sets)).index_add(0, index, (square > 0).float())
    return float((varied == 0).float().mean())


def _scaled(deviation: Tensor, values: Tensor, comparison: Tensor, std: str, eps: float, ddof: int) -> Tensor:
    if std == "none":
        return deviation
    everyone = comparison if std == "group" else torch.zeros(len(values), dtype=torch.long)
    _, count, square = _set_statistics(values, everyone)
    return deviation / (torch.sqrt(square / (count - ddof).clamp(min=1)) + eps)


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
