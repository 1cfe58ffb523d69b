"""Combination of the rewards of a sample, before credit assignment.

The members of a sample are weight x (reward - offset), one for each reward. `worst` and `cautious` reduce them to one
number before credit assignment, because a minimum does not commute with step gains or means of leaves. `sum`,
`per_reward` and `decoupled` keep one column per reward for the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.sections import RewardUse
from flowgrpo.training.advantages.baseline import Baseline, weighted_sum
from rewards import Reward


@dataclass(frozen=True)
class Combination:
    """The way in which a run combines its R rewards."""

    form: str  # as `Baseline.combine`
    caution: float  # as `Baseline.caution`
    scale: Tensor  # (R,) float64 weights of the rewards
    offset: Tensor  # (R,) float64, the reward that counts as 0

    @classmethod
    def of(cls, rewards: Sequence[Reward] | Sequence[RewardUse], baseline: Baseline) -> Combination:
        """Build the combination of rewards from the options of a baseline."""
        scale, offset = (
            torch.tensor([getattr(reward, name) for reward in rewards], dtype=torch.float64)
            for name in ("weight", "offset")
        )
        return cls(baseline.combine, baseline.caution, scale, offset)

    @property
    def weights(self) -> Tensor:
        """Return the weights of the columns that `columns` returns: (R,), or (1,) with weight 1 for worst and cautious."""
        return torch.ones(1, dtype=torch.float64) if self.form in AT_ONCE else self.scale

    def columns(self, rewards: Tensor) -> Tensor:
        """Return the values that credit is assigned from, given rewards (B, R): (B, R), or (B, 1) for worst and cautious."""
        shifted = rewards - self.offset
        if self.form not in AT_ONCE:
            return shifted
        members = shifted * self.scale
        return (worst(members) if self.form == "worst" else cautious(members, self.caution))[:, None]

    def total(self, rewards: Tensor) -> Tensor:
        """Return the total reward (B,) of samples from their rewards (B, R); NaN where no reward applies."""
        return weighted_sum(self.columns(rewards), self.weights)


AT_ONCE = ("worst", "cautious")


def worst(members: Tensor) -> Tensor:
    """Return the smallest known value (B,) of weighted rewards `members` (B, R); NaN where none is known.

    Worst-case optimisation over an ensemble of reward models (arXiv 2310.02743): exploiting one of them gains nothing.
    """
    return members.nan_to_num(torch.inf).amin(1).where(members.isfinite().any(1), torch.nan)


def cautious(members: Tensor, caution: float) -> Tensor:
    """Return mean minus `caution` x variance (B,) of known weighted rewards `members` (B, R); NaN where none is known.

    Uncertainty-weighted optimisation (arXiv 2310.02743). The variance divides by the number of members, as in the
    paper, so a single member stays unchanged. The paper's code divides by one less.
    """
    known = members.isfinite()
    count = known.sum(1, keepdim=True).clamp(min=1)
    mean = members.where(known, 0.0).sum(1, keepdim=True) / count
    variance = ((members - mean).where(known, 0.0) ** 2).sum(1, keepdim=True) / count
    return (mean - caution * variance)[:, 0].where(known.any(1), torch.nan)
