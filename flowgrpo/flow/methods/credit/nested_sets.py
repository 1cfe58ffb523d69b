"""Credit for trees by nested comparisons: an edge with all edges of its step, and with ever closer relatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
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
    """Give each edge the mean reward of the ends below it; compare it with nested sets of edges of the same step.

    The sets of an edge, from large to small: all edges of the step; families, which are the edges below the same start
    or below the same child of an earlier split; and siblings. A weight of 0 leaves a comparison out. The mean of a set
    leaves out the edge's own leaves, see `training.advantages.comparison_sets.nested_leave_one_out`. If it included
    them, n of N, the edge's gradient would be scaled by 1 - n / N: by 0.5 at the first split of one binary tree, by
    0.94 at its fourth. Needs the baseline leave_one_out.

    With other weights, and with the own leaves in the means, it is the credit of TEMPO (arXiv 2509.18314), SPO of segments
    (arXiv 2505.23564), TreePO (arXiv 2508.17445), GiGPO (arXiv 2505.10978) and HGPO (arXiv 2602.22817).
    """

    name: Literal["nested"] = "nested"
    group: float = Field(0.75, ge=0)
    """Weight of the comparison with all other edges of the step, in all trees of the group."""
    between: float = Field(0.0, ge=0)
    """Weight of each comparison with a family: the step's edges below the same start, or the same child of a split."""
    siblings: float = Field(0.25, ge=0)
    """Weight of the comparison with the edges that leave the same state."""
    starts: bool = False
    """For likelihood elbo: also compare the trees of a group with each other, as siblings, and give credit to no other edges
    than those that leave a start or a split."""

    @model_validator(mode="after")
    def _some(self) -> Nested:
        if not self.group + self.between + self.siblings:
            raise InputError("algorithm.credit: nested compares nothing, raise group, between or siblings above 0")
        return self

    @override
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        lines = [tree.ancestry(tree.leaves[index]) for index in trunk_ends(tree)]
        on_path = {edge for line in lines for edge in line}
        edges = [i for i in stochastic_edges(tree) if i in on_path]
        roots: set[int] = set()  # edges that leave a start alone, whose siblings are the other trees
        if self.starts:
            splits = _leaving_splits(tree, on_path)
            roots = {line[-1] for line in lines} - splits
            edges = sorted(roots | splits)
        nodes = [tree.nodes[i] for i in edges]
        starts = [node.root.index for node in nodes]
        members, weight = [], []
        for edge, families, node, start in zip(edges, _families(tree, edges, self.between), nodes, starts, strict=True):
            siblings = [-1, -1] if edge in roots else [start, node.parent]
            members.append([[-1, -1], *([start, family] for family in families), siblings])
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
    """Return the mean known reward (nodes, R) of the trajectory ends below each node; NaN if none is known."""
    total = torch.zeros(len(tree.nodes), rewards.shape[1], dtype=torch.float64)
    count = torch.zeros_like(total)
    for index in trunk_ends(tree):
        line = tree.ancestry(tree.leaves[index])
        total[line] += rewards[index].nan_to_num()
        count[line] += rewards[index].isfinite()
    return total / count  # 0 / 0 is NaN


def _families(tree: Tree, edges: list[int], between: float) -> list[list[int]]:
    """Return the family roots above each edge: its start, and each of its ancestors that is a child of a split.

    Lists are padded with -1 to a length that depends on the schedule alone, so that processes can concatenate theirs.
    They are empty if `between` is 0.
    """
    if not between:
        return [[] for _ in edges]
    split = _leaving_splits(tree, edges)
    padded = []
    for i in edges:
        state = parent_of(tree, i)
        line = tree.ancestry(state)  # the state and its ancestors, without the start
        above = [node for node in line[1:] if node in split]
        start = [parent_of(tree, line[-1])] if line else []
        families = [*start, *reversed(above)]
        padded.append([*families, *[-1] * (len(tree.sigmas) - len(families))])
    return padded


def _leaving_splits(tree: Tree, edges: Collection[int]) -> set[int]:
    """Return those of `edges` that leave a state together with others of them."""
    children = Counter(tree.nodes[i].parent for i in edges)
    return {i for i in edges if children[tree.nodes[i].parent] > 1}


def _kin(tree: Tree, edges: list[int]) -> tuple[list[tuple[int, int]], list[float]]:
    """Return a key (state, move) of each edge, equal for edges that share noise, and the covariance of their noise."""
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
