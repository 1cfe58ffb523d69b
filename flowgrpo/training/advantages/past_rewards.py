"""Rewards of earlier iterations, as baselines see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.schema.imports.heavy import Tensor


@dataclass(frozen=True)
class PastRewards:
    """Rewards before this iteration: of the prompt of each of U units, and of all prompts.

    Counts are discounted, see `train.half_life`. A unit here is one sample.
    """

    count: Tensor  # (U,) float64 number of rewards of the prompt; 0 if it is unseen
    mean: Tensor  # (U,) float64 their mean; NaN if the prompt is unseen
    square: Tensor  # (U,) float64 sum of their squared deviations from the mean
    memory: Sequence[float] = ()  # what the baseline remembers of all rewards, see `Baseline.remember`
