"""What the rewards of a shown sample come to together, and the bounds of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo.schema.heavy import torch
from flowgrpo.training.combination import Combination
from rewards import BUILT_IN


@dataclass(frozen=True)
class Totals:
    """The rewards that a run is trained on.

    Attributes:
        names: of the rewards; none without a config.
        bounds: of the values of each; None where nobody has stated any.
        combination: of them.
    """

    names: list[str]
    bounds: list[tuple[float, float] | None]
    combination: Combination

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Totals:
        """Those of a run's config.yaml; of an empty one, for samples without a run."""
        uses = config.get("rewards", [])
        baseline = config.get("algorithm", {}).get("baseline", {})
        return cls(
            [name_of(use) for use in uses],
            [BUILT_IN[use["use"]].bounds if use["use"] in BUILT_IN else None for use in uses],
            Combination(
                baseline.get("combine", "sum"),
                baseline.get("caution", 0.0),  # what a run before there was the key has not
                torch.tensor([use["weight"] for use in uses], dtype=torch.float64),
                torch.tensor([use.get("offset", 0.0) for use in uses], dtype=torch.float64),
            ),
        )

    def total(self, rewards: Mapping[str, float | None]) -> float | None:
        """What counts for a sample; without a config the sum of all its rewards. None where none is known."""
        known = {name: value for name, value in rewards.items() if value is not None}
        if not self.names:
            return sum(known.values()) if known else None
        row = torch.tensor([[known.get(name, torch.nan) for name in self.names]], dtype=torch.float64)
        total = float(self.combination.total(row))
        return None if total != total else total

    def total_bounds(self, rewards: Mapping[str, float | None]) -> tuple[float, float] | None:
        """The bounds of that total; None where a part has none, or where a mean is cautious."""
        parts = [
            (bounds, float(scale), float(offset))
            for name, bounds, scale, offset in zip(
                self.names, self.bounds, self.combination.scale, self.combination.offset, strict=True
            )
            if rewards.get(name) is not None
        ]
        if not parts or self.combination.form == "cautious" or any(bounds is None for bounds, _, _ in parts):
            return None
        ends = [sorted(scale * (end - offset) for end in bounds) for bounds, scale, offset in parts]
        together = min if self.combination.form == "worst" else sum
        return together(low for low, _ in ends), together(high for _, high in ends)


def name_of(use: Mapping[str, Any]) -> str:
    """Name of a config's reward in the metrics."""
    return use["name"] or use["use"].rpartition(":")[2]
