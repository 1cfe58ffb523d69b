"""Combine the rewards of a shown sample into the total that training used, and bound that total."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewards import BUILT_IN


@dataclass(frozen=True)
class Member:
    """A trained reward; weight x (reward - offset) enters the total. `bounds` are those of the reward itself, if known."""

    name: str
    weight: float
    offset: float
    bounds: tuple[float, float] | None

    def of(self, value: float) -> float:
        """Return the term that enters the total for a value of this reward."""
        return self.weight * (value - self.offset)


@dataclass(frozen=True)
class Totals:
    """The trained rewards of a run; `form` and `caution` are those of `algorithm.baseline`."""

    members: list[Member]
    form: str
    caution: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Totals:
        """Return the totals of a run's config.yaml, or of samples without a run (an empty config)."""
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
        return cls(members, baseline.get("combine", "sum"), baseline.get("caution", 0.0))  # old runs lack caution

    @property
    def names(self) -> list[str]:
        """Names of the trained rewards."""
        return [member.name for member in self.members]

    def total(self, rewards: Mapping[str, float | None]) -> float | None:
        """Return the total of a sample, the plain sum without a config; None if no reward is known."""
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
        """Return the bounds of the total; None if a reward has none, or if the form is `cautious`."""
        parts = [member for member in self.members if rewards.get(member.name) is not None]
        ends = [sorted(map(member.of, member.bounds)) for member in parts if member.bounds is not None]
        if not parts or self.form == "cautious" or len(ends) < len(parts):
            return None
        combine = min if self.form == "worst" else sum
        return combine(low for low, _ in ends), combine(high for _, high in ends)


def name_of(use: Mapping[str, Any]) -> str:
    """Return a reward's name in the metrics."""
    return use["name"] or use["use"].rpartition(":")[2]


def watched_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the rewards that a run evaluates but does not train on."""
    return [name_of(use) for use in config.get("eval_rewards", [])]
