"""Compared with what?"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from flowgrpo import advantage
from flowgrpo.axes.base import Choice


class Baseline(Choice):
    """Options of every baseline: what scales the deviation, and the bound on what results."""

    eps: float = Field(1e-4, ge=0)
    ddof: Literal[0, 1] = 0
    clip: float = Field(5.0, gt=0)

    def advantages(
        self, values: torch.Tensor, comparison: torch.Tensor, anchor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Advantages (U,) of values (U,) within their sets, and `anchor` (U,) times the value on top."""
        found = getattr(advantage, self.name)(values, comparison, self.std, self.eps, self.ddof)
        if anchor is not None:
            found = found + anchor * values.nan_to_num()
        return found.clamp(-self.clip, self.clip)


class GroupMean(Baseline):
    """The mean of the set."""

    name: Literal["group_mean"] = "group_mean"
    std: Literal["group", "global", "none"] = "group"


class LeaveOneOut(Baseline):
    """The mean of the others of the set."""

    name: Literal["leave_one_out"] = "leave_one_out"
    std: Literal["group", "global", "none"] = "none"
