"""What the rewards of a shown sample come to together, and the bounds of that, as a batch has them in training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewards import BUILT_IN


@dataclass(frozen=True)
class Member:
    """A reward that a run is trained on: weight x (reward - offset) counts.

    Attributes:
        bounds: of its values; None where nobody has stated any.
    """

    name: str
    weight: float
    offset: float
    bounds: tuple[float, float] | None

    def of(self, value: float) -> float:
        """What a value counts."""
        return self.weight * (value - self.offset)


@dataclass(frozen=True)
class Totals:
    """The rewards that a run is trained on.

    Attributes:
        members: of the sum; none without a config.
        form: how they are put together, as `algorithm.baseline.combine`.
        caution: of the form `cautious`.
    """

    members: list[Member]
    form: str
    caution: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Totals:
        """Those of a run's config.yaml; of an empty one, for samples without a run."""
        baseline = config.get("algorithm", {}).get("baseline", {})
        members = [
            Member(
                name_of(use),
                use["weight"],
                use.get("offset", 0.0),
                BUILT_IN[use["use"]].bounds if use["use"] in BUILT_IN else None,
            )
            for use in config.get("rewards", [])
        ]
        # a run before there was the key has no caution
        return cls(members, baseline.get("combine", "sum"), baseline.get("caution", 0.0))

    @property
    def names(self) -> list[str]:
        """Of the rewards."""
        return [member.name for member in self.members]

    def total(self, rewards: Mapping[str, float | None]) -> float | None:
        """What counts for a sample; without a config the sum of all its rewards. None where none is known."""
        known = {name: value for name, value in rewards.items() if value is not None}
        if not self.members:
            return sum(known.values()) if known else None
        counted = [member.of(known[member.name]) for member in self.members if member.name in known]
        if not counted:
            return None
        if self.form == "worst":
            return min(counted)
        if self.form == "cautious":
            return statistics.mean(counted) - self.caution * statistics.pvariance(counted)
        return sum(counted)

    def total_bounds(self, rewards: Mapping[str, float | None]) -> tuple[float, float] | None:
        """The bounds of that total; None where a part has none, or where a mean is cautious."""
        parts = [member for member in self.members if rewards.get(member.name) is not None]
        ends = [sorted(map(member.of, member.bounds)) for member in parts if member.bounds is not None]
        if not parts or self.form == "cautious" or len(ends) < len(parts):
            return None
        together = min if self.form == "worst" else sum
        return together(low for low, _ in ends), together(high for _, high in ends)


def name_of(use: Mapping[str, Any]) -> str:
    """Name of a config's reward in the metrics."""
    return use["name"] or use["use"].rpartition(":")[2]
