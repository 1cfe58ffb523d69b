"""Credit units: the trajectories, branches or step gains whose rewards are compared, and their edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.comparison_sets import NestedSets, Survival


@dataclass(frozen=True)
class CreditUnits:
    """U units that are compared with each other: trajectories, branches, or gains of steps."""

    values: Tensor  # (U, R) float64, one column per reward; NaN where a reward does not apply or was lost
    comparison: Tensor  # (U, C) integers; units with equal rows form one set, the first column is the group
    weight: Tensor  # (U,) float64 loss weight of the unit's edges
    of_edge: Tensor  # (nodes,) index of the unit that owns the edge to each node, -1 for none
    _: KW_ONLY
    root: Tensor  # (U,) index of the unit's root (of its answer, for texts) within the group
    anchor: Tensor | None = None  # (U,) float64; anchor x value is added to the advantage
    nested: NestedSets | None = None  # smaller sets within those of `comparison`
    survival: Survival | None = None  # which units were sampled to the end; None: all

    def to_edges(self, values: Tensor) -> Tensor:
        """Return (nodes,): for the edge to each node, the value in `values` (U,) of the edge's unit; 0 if it has none."""
        return values[self.of_edge].where(self.of_edge >= 0, torch.zeros((), dtype=values.dtype))

    @property
    def compares(self) -> bool:
        """Return whether any unit is compared with another one."""
        if self.nested is not None:
            return self.nested.compares(self.comparison)
        return len(self.comparison.unique(dim=0)) < len(self.comparison)

    @classmethod
    def concatenate(cls, parts: Sequence[CreditUnits]) -> tuple[CreditUnits, list[Tensor]]:
        """Merge the units of several processes; return all units, and the indices of each process's units among them.

        The merged units are sorted by group and root, so that ties are broken alike for any number of processes. Their
        `of_edge` is empty.
        """
        group, root = (torch.cat(each) for each in zip(*((u.comparison[:, 0], u.root) for u in parts), strict=True))
        by_root = root.argsort(stable=True)
        order = by_root[group[by_root].argsort(stable=True)]

        def every(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])[order]

        nested = [part.nested for part in parts if part.nested is not None]
        survival = [part.survival for part in parts if part.survival is not None]
        joined = cls(
            every("values"),
            every("comparison"),
            every("weight"),
            torch.empty(0, dtype=torch.long),
            root=root[order],
            anchor=None if parts[0].anchor is None else every("anchor"),
            nested=NestedSets.concatenate(nested, order) if nested else None,
            survival=Survival.concatenate(survival, order) if survival else None,
        )
        return joined, list(order.argsort().split([len(part.values) for part in parts]))
