"""Baselines that compare with the rewards of earlier iterations, and the names of all baselines."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from pydantic import model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import named
from flowgrpo.schema.imports.heavy import Tensor
from flowgrpo.training.advantages.baseline import (
    Absolute,
    Baseline,
    Best,
    Beta,
    GroupMean,
    LeaveOneOut,
    Median,
    Raw,
    leave_one_out,
    standardize,
)
from flowgrpo.training.advantages.past_rewards import PastRewards


class PastBaseline(Baseline):
    """Base class of baselines that compare with earlier rewards. They remember one number for each trajectory."""

    @model_validator(mode="after")
    def _one_number(self) -> PastBaseline:
        if self.combine in ("per_reward", "decoupled"):
            raise InputError(
                f"algorithm.baseline.combine: {self.name} remembers one number for each prompt, take sum, worst or cautious"
            )
        return self

    @override
    def relative(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        if comparison.shape[1] > 1:
            raise InputError(
                f"algorithm.baseline: {self.name} remembers what whole trajectories gave, take credit=terminal"
            )
        return self.relative_to_past(values, comparison, past)

    @abstractmethod
    def relative_to_past(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        """Return the advantages (U,) of trajectories; see `Baseline.relative`."""


class Tracker(PastBaseline):
    """Baseline that subtracts the prompt's mean reward so far in this run (SPO, arXiv 2509.13232).

    For a prompt without earlier rewards it is leave-one-out. A group of equal rewards still has a signal: whether they
    are better than expected. With std `global`, the mean of all deviations is subtracted as well, as in SPO.
    """

    name: Literal["tracker"] = "tracker"
    std: Literal["global", "none"] = "global"
    """Standard deviation that divides: of the batch (global), or none."""

    @override
    def relative_to_past(self, values: Tensor, comparison: Tensor, past: PastRewards | None) -> Tensor:
        others = values - leave_one_out(values, comparison)
        known = others if past is None else past.mean.where(past.mean.isfinite(), others)
        deviation = values - known
        return standardize(deviation, self.eps, self.ddof) if self.std == "global" else deviation.nan_to_num()


BASELINES = named(GroupMean, LeaveOneOut, Median, Beta, Tracker, Absolute, Raw, Best)
