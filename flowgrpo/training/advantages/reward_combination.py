"""How the rewards of a sample become what is credited: each by itself, or at once the worst or a cautious mean of them.

A member is weight x (reward - offset). `worst` and `cautious` are one number of a sample, made before credit, for a minimum
does not commute with gains of steps or means of leaves; `sum`, `per_reward` and `decoupled` leave the rewards to the
baseline, which adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.wings import Comparing
from flowgrpo.training.advantages.baseline import combined
from rewards import Reward


@dataclass(frozen=True)
class Combination:
    """How a run puts its rewards together.

    Attributes:
        form: as `Baseline.combine`.
        caution: of `cautious`.
        scale: (R,) float64 weights of the rewards.
        offset: (R,) float64, what counts as 0 of each.
    """

    form: str
    caution: float
    scale: Tensor
    offset: Tensor

    @classmethod
    def of(cls, rewards: Sequence[Reward], baseline: Comparing) -> Combination:
        """That of some rewards, by the options of a baseline."""
        scale, offset = (
            torch.tensor([getattr(reward, name) for reward in rewards], dtype=torch.float64)
            for name in ("weight", "offset")
        )
        return cls(baseline.combine, baseline.caution, scale, offset)

    @property
    def weights(self) -> Tensor:
        """Weights of the columns that are credited: the rewards', or 1 of what they came to."""
        return torch.ones(1, dtype=torch.float64) if self.form in AT_ONCE else self.scale

    def columns(self, rewards: Tensor) -> Tensor:
        """What is credited of the rewards (B, R) of samples: (B, R), of which the weighted sum counts, or (B, 1)."""
        own = rewards - self.offset
        if self.form not in AT_ONCE:
            return own
        members = own * self.scale
        return (worst(members) if self.form == "worst" else cautious(members, self.caution))[:, None]

    def total(self, rewards: Tensor) -> Tensor:
        """The number (B,) that counts for each sample, of its rewards (B, R); NaN where no reward applies."""
        return combined(self.columns(rewards), self.weights)


AT_ONCE = ("worst", "cautious")


def worst(members: Tensor) -> Tensor:
    """The smallest (B,) of the members (B, R) of each sample that are known; NaN where none is.

    Worst-case optimisation over an ensemble of reward models of one quantity (arXiv 2310.02743): a policy gains nothing by
    a shortcut that raises one of them.
    """
    return members.nan_to_num(torch.inf).amin(1).where(members.isfinite().any(1), torch.nan)


def cautious(members: Tensor, caution: float) -> Tensor:
    """The mean (B,) of the known members (B, R) of each sample, minus `caution` times their variance; NaN where none is.

    Uncertainty-weighted optimisation (arXiv 2310.02743), with the paper's variance, which divides by the number of members,
    where the code divides by one less: so one member is what it was. The variance has the square of a reward's unit.
    """
    known = members.isfinite()
    count = known.sum(1, keepdim=True).clamp(min=1)
    mean = members.where(known, 0.0).sum(1, keepdim=True) / count
    variance = ((members - mean).where(known, 0.0) ** 2).sum(1, keepdim=True) / count
    return (mean - caution * variance)[:, 0].where(known.any(1), torch.nan)
