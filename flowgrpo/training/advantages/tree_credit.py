"""Credit on trees: the rewards of trajectories become values of edges, which are compared with each other.

An edge is named by the node it leads to. Its value is a mean of the rewards of the trajectories that pass through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.comparison_sets import NestedSets
from flowgrpo.training.advantages.credit_units import CreditUnits


class NestedWeights(Choice):
    """Weights of the nested sets that an edge is compared with."""

    group: float = Field(0.75, ge=0)
    """Weight of the comparison with all other edges of the depth, in all trees of the group."""
    between: float = Field(0.0, ge=0)
    """Weight of each comparison with a family: the edges of the depth below the same start, or the same child of a split."""
    siblings: float = Field(0.25, ge=0)
    """Weight of the comparison with the edges that leave the same state."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.group + self.between + self.siblings:
            raise InputError("algorithm.credit: nested compares nothing, raise group, between or siblings above 0")
        return self


@dataclass(frozen=True, kw_only=True)
class TreePaths:
    """The nodes of trees, and the trajectories through them."""

    parent: Sequence[int | None]  # of each node; None for a start
    step: Sequence[int]  # of each node; edges that lead to nodes of one step have one depth
    group: Sequence[int]  # group of each node
    root: Sequence[int]  # index of each node's start within its group
    lines: Sequence[Sequence[int]]  # edges of each trajectory, from its end to its start

    @property
    def edges(self) -> list[int]:
        """The edges of all trajectories, parents before children."""
        return sorted({edge for line in self.lines for edge in line})

    def line(self, node: int) -> list[int]:
        """Return the edges from a node up to its start."""
        edges: list[int] = []
        at: int | None = node
        while at is not None and (above := self.parent[at]) is not None:
            edges.append(at)
            at = above
        return edges


def edge_units(
    paths: TreePaths, edges: Sequence[int], values: Tensor, comparison: Sequence[tuple[int, ...]]
) -> CreditUnits:
    """Return a credit unit of weight 1 for each edge of `edges`; `values` and `comparison` as in `CreditUnits`."""
    of_edge = torch.full((len(paths.parent),), -1)
    of_edge[list(edges)] = torch.arange(len(edges))
    root = torch.tensor([paths.root[i] for i in edges])
    ones = torch.ones(len(edges), dtype=torch.float64)
    return CreditUnits(values, torch.tensor(comparison), ones, of_edge, root=root)


def subtree_means(paths: TreePaths, rewards: Tensor) -> Tensor:
    """Return the mean known reward (nodes, R) of the trajectories through each node; NaN if none is known.

    `rewards` (trajectories, R) float64 are in the order of `paths.lines`, NaN where a reward is missing.
    """
    total = torch.zeros(len(paths.parent), rewards.shape[1], dtype=torch.float64)
    count = torch.zeros_like(total)
    for line, reward in zip(paths.lines, rewards, strict=True):
        total[list(line)] += reward.nan_to_num()
        count[list(line)] += reward.isfinite()
    return total / count  # 0 / 0 is NaN


def depthwise_units(
    paths: TreePaths, rewards: Tensor, *, beta: float = 0.0, log_prob: Tensor | None = None
) -> CreditUnits:
    """Return the edges as units, each with the fused reward of its trajectories; edges of one depth in a group compare.

    BranchGRPO (arXiv 2509.06040): r(n) = sum of w_l r_l over the trajectories l through n. The weights are uniform, or the
    softmax of beta times the summed `log_prob` (nodes,) of the edges from n to the end of l.
    """
    edges = paths.edges
    row = {edge: unit for unit, edge in enumerate(edges)}
    above = torch.zeros(len(edges), len(paths.lines), dtype=torch.bool)
    score = torch.zeros(len(edges), len(paths.lines), dtype=torch.float64)
    for column, line in enumerate(paths.lines):
        below = 0.0
        for edge in line:  # from the end upwards: `below` is the path's log-probability given the node
            above[row[edge], column] = True
            if log_prob is not None:
                score[row[edge], column] = beta * below
                below += float(log_prob[edge])
    fused = []
    for reward in rewards.T:  # (trajectories,)
        known = above & reward.isfinite()
        weight = torch.softmax(score.where(known, -torch.inf), dim=1).nan_to_num()  # (edges, trajectories)
        fused.append((weight @ reward.nan_to_num()).where(known.any(1), torch.nan))
    depth = [(paths.group[i], paths.step[i]) for i in edges]
    return edge_units(paths, edges, torch.stack(fused, dim=1), depth)


def nested_units(
    paths: TreePaths,
    rewards: Tensor,
    *,
    edges: Sequence[int],
    depth: int,
    group: float,
    between: float,
    siblings: float,
    growth: float = 0.0,
    starts: Collection[int] = (),
    kin: Sequence[tuple[int, int]] | None = None,
    alike: Sequence[float] | None = None,
) -> CreditUnits:
    """Return edges as units in nested sets: all edges of the step, families, and siblings.

    A family are the edges below one start, or below one child of an earlier split.

    Args:
        edges: the edges that get credit, parents before children.
        depth: largest number of families of an edge.
        group, between, siblings: weights of the comparisons with all edges of the step, with each family, with siblings.
            Sets that are the same count once, see `NestedSets.weights`.
        growth: see `NestedSets`.
        starts: edges whose siblings are those of all trees of the group.
        kin, alike: key and covariance of the noise that an edge shares with others, see `NestedSets`; None: none does.
    """
    roots = [paths.root[i] for i in edges]
    members, weight = [], []
    for edge, families, root in zip(edges, _families(paths, edges, between, depth), roots, strict=True):
        same = [-1, -1] if edge in starts else [root, _parent(paths, edge)]
        members.append([[-1, -1], *([root, family] for family in families), same])
        weight.append([group, *(between * (family >= 0) for family in families), siblings])
    sets = NestedSets(
        torch.tensor(members),
        torch.tensor(weight, dtype=torch.float64),
        torch.tensor([(root, *own) for root, own in zip(roots, kin or [(i, 0) for i in edges], strict=True)]),
        torch.tensor(alike or [0.0] * len(edges), dtype=torch.float64),
        growth=growth,
    )
    comparison = [(paths.group[i], paths.step[i]) for i in edges]
    units = edge_units(paths, edges, subtree_means(paths, rewards)[list(edges)], comparison)
    return replace(units, nested=sets)


def leaving_splits(paths: TreePaths, edges: Collection[int]) -> set[int]:
    """Return those of `edges` that leave a state together with others of them."""
    children = Counter(paths.parent[i] for i in edges)
    return {i for i in edges if children[paths.parent[i]] > 1}


def _families(paths: TreePaths, edges: Sequence[int], between: float, depth: int) -> list[list[int]]:
    """Return the family roots above each edge: its start, and each of its ancestors that is a child of a split.

    Lists are padded with -1 to the length `depth`, so that processes can concatenate theirs. They are empty if `between`
    is 0.
    """
    if not between:
        return [[] for _ in edges]
    split = leaving_splits(paths, edges)
    padded = []
    for i in edges:
        line = paths.line(_parent(paths, i))
        start = [_parent(paths, line[-1])] if line else []
        families = [*start, *reversed([node for node in line[1:] if node in split])]
        padded.append([*families, *[-1] * (depth - len(families))])
    return padded


def _parent(paths: TreePaths, edge: int) -> int:
    parent = paths.parent[edge]
    assert parent is not None, "no edge leads to a start"
    return parent
