"""Credit of trees by nested comparisons: of an edge with its depth, and with smaller and smaller families."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit.rules import Credit, edge_units, parent_of, stochastic_edges, trunk_ends
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.comparison_sets import NestedSets
from flowgrpo.training.advantages.credit_units import CreditUnits

if TYPE_CHECKING:
    from samplers.trees import Tree


class Nested(Credit):
    """Give each edge the mean reward of the ends below it; compare it with its depth, with families above and with siblings.

    The mean of a set leaves out the edge's own leaves (`training.advantages.comparison_sets.nested_leave_one_out`). With
    these, n of N, it would scale the edge's gradient by 1 - n / N: by 0.5 at the first split of one binary tree, by 0.94 at
    its fourth. A weight of 0 leaves a comparison out. Needs the baseline leave_one_out.
    """

    name: Literal["nested"] = "nested"
    group: float = Field(0.75, ge=0)
    """Weight of the comparison with all other edges of the step, of all trees of the group."""
    between: float = Field(0.0, ge=0)
    """Weight of each comparison with the edges of the step below one start, and below one child of each earlier split."""
    siblings: float = Field(0.25, ge=0)
    """Weight of the comparison with the edges that leave the same state."""

    @model_validator(mode="after")
    def _some(self) -> Nested:
        if not self.group + self.between + self.siblings:
            raise InputError("algorithm.credit: nested compares nothing, raise group, between or siblings above 0")
        return self

    @override
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        on_path = {edge for index in trunk_ends(tree) for edge in tree.ancestry(tree.leaves[index])}
        edges = [i for i in stochastic_edges(tree) if i in on_path]
        nodes = [tree.nodes[i] for i in edges]
        starts = [node.root.index for node in nodes]
        members, weight = [], []
        for families, node, start in zip(_families(tree, edges, self.between), nodes, starts, strict=True):
            members.append([[-1, -1], *([start, family] for family in families), [start, node.parent]])
            weight.append([self.group, *(self.between * (family >= 0) for family in families), self.siblings])
        kin, alike = _kin(tree, edges)
        sets = NestedSets(
            torch.tensor(members),
            torch.tensor(weight, dtype=torch.float64),
            torch.tensor([(start, *own) for start, own in zip(starts, kin, strict=True)]),
            torch.tensor(alike, dtype=torch.float64),
        )
        comparison = [(node.root.group, node.step) for node in nodes]
        return replace(edge_units(tree, edges, subtree_means(tree, rewards)[edges], comparison), nested=sets)


def subtree_means(tree: Tree, rewards: Tensor) -> Tensor:
    """Return the mean (nodes, R) of the known rewards of the trajectories' ends below each node; NaN without any."""
    total = torch.zeros(len(tree.nodes), rewards.shape[1], dtype=torch.float64)
    count = torch.zeros_like(total)
    for index in trunk_ends(tree):
        line = tree.ancestry(tree.leaves[index])
        total[line] += rewards[index].nan_to_num()
        count[line] += rewards[index].isfinite()
    return total / count  # 0 / 0 is NaN


def _families(tree: Tree, edges: list[int], between: float) -> list[list[int]]:
    """Return the nodes above each edge's state that root a family: its start, and each child of an earlier split.

    Lists are padded by -1 to a length that depends on the schedule alone, since processes join theirs; 0 if `between` is.
    """
    if not between:
        return [[] for _ in edges]
    children = Counter(tree.nodes[i].parent for i in edges)
    split = {i for i in edges if children[tree.nodes[i].parent] > 1}
    padded = []
    for i in edges:
        state = parent_of(tree, i)
        line = tree.ancestry(state)  # the state itself, and what is above it but the start
        above = [node for node in line[1:] if node in split]
        start = [parent_of(tree, line[-1])] if line else []
        families = [*start, *reversed(above)]
        padded.append([*families, *[-1] * (len(tree.sigmas) - len(families))])
    return padded


def _kin(tree: Tree, edges: list[int]) -> tuple[list[tuple[int, int]], list[float]]:
    """Return the (state, move) of each edge, equal for kin, and the covariance of the noise of kin."""
    kin: dict[int, tuple[int, int]] = {}
    alike: dict[int, float] = {}
    for evaluation in tree.evaluations:
        for ordinal, each in enumerate(evaluation.edges):
            strength = each.move.sibling_strength
            shared = 0.0 if strength is None or each.move.count < 2 else 1 / (1 + strength**2)
            if shared == 1:
                raise InputError(
                    "algorithm.credit: nested needs siblings of different noise, raise sibling_strength above 0"
                )
            for node in each.nodes.tolist():
                kin[node], alike[node] = (parent_of(tree, node), ordinal), shared
    return [kin[i] for i in edges], [alike[i] for i in edges]
