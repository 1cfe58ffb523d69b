"""Credit of trees by nested comparisons: an edge against the others of its depth, and of smaller and smaller families."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit.rules import Credit, left_by, stochastic_edges, trunk_ends
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.comparison_sets import NestedSets
from flowgrpo.training.advantages.credit_units import CreditUnits

if TYPE_CHECKING:
    from samplers.trees import Tree


class Nested(Credit):
    """The mean reward of the leaves below an edge, minus that of the others of its depth, of a family above, of its state.

    A weight of 0 leaves a comparison out. Needs the baseline leave_one_out.
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
        return nested(tree, rewards, group=self.group, between=self.between, siblings=self.siblings)


def nested(tree: Tree, rewards: Tensor, *, group: float, between: float, siblings: float) -> CreditUnits:
    """Each stochastic edge of a trajectory has the mean reward of the ends below it, and the sets it is compared in.

    The rule is `training.advantages.comparison_sets.nested_leave_one_out`. A mean over a set that has the edge's own leaves
    in it, n of N, scales the edge's gradient by 1 - n / N: by 0.5 at the first split of one binary tree, and 0.94 at its
    fourth. That is a weighting of the steps that nobody chose, and it is not here.

    Args:
        group: weight of this level, see `Nested`.
        between: weight of this level, see `Nested`.
        siblings: weight of this level, see `Nested`.
    """
    on_path = {edge for index in trunk_ends(tree) for edge in tree.ancestry(tree.leaves[index])}
    edges = [i for i in stochastic_edges(tree) if i in on_path]
    nodes = [tree.nodes[i] for i in edges]
    starts = [node.root.index for node in nodes]
    members, weight = [], []
    for families, node, start in zip(_families(tree, edges, between), nodes, starts, strict=True):
        members.append([[-1, -1], *([start, family] for family in families), [start, node.parent]])
        weight.append([group, *(between * (family >= 0) for family in families), siblings])
    kin, alike = _kin(tree, edges)
    of_edge = torch.full((len(tree.nodes),), -1)
    of_edge[edges] = torch.arange(len(edges))
    return CreditUnits(
        subtree_means(tree, rewards)[edges],
        torch.tensor([(node.root.group, node.step) for node in nodes]),
        torch.ones(len(edges), dtype=torch.float64),
        of_edge,
        root=torch.tensor(starts),
        nested=NestedSets(
            torch.tensor(members),
            torch.tensor(weight, dtype=torch.float64),
            torch.tensor([(start, *own) for start, own in zip(starts, kin, strict=True)]),
            torch.tensor(alike, dtype=torch.float64),
        ),
    )


def subtree_means(tree: Tree, rewards: Tensor) -> Tensor:
    """Mean (nodes, R) of the known rewards of the trajectories' ends below each node but the starts; NaN without any."""
    total = torch.zeros(len(tree.nodes), rewards.shape[1], dtype=torch.float64)
    count = torch.zeros_like(total)
    for index in trunk_ends(tree):
        line = tree.ancestry(tree.leaves[index])
        total[line] += rewards[index].nan_to_num()
        count[line] += rewards[index].isfinite()
    return total / count  # 0 / 0 is NaN


def _families(tree: Tree, edges: list[int], between: float) -> list[list[int]]:
    """Of each edge the nodes strictly above the state it leaves below each of which a family lies, and -1 for no more.

    They are its start and each child of an earlier split. All lists have one length, which depends on the schedule alone,
    for processes join theirs; it is 0 where `between` is.
    """
    if not between:
        return [[] for _ in edges]
    children = Counter(tree.nodes[i].parent for i in edges)
    split = {i for i in edges if children[tree.nodes[i].parent] > 1}
    found = []
    for i in edges:
        state = left_by(tree, i)
        line = tree.ancestry(state)  # the state itself, and what is above it but the start
        above = [node for node in line[1:] if node in split]
        start = [left_by(tree, line[-1])] if line else []
        families = [*start, *reversed(above)]
        found.append([*families, *[-1] * (len(tree.sigmas) - len(families))])
    return found


def _kin(tree: Tree, edges: list[int]) -> tuple[list[tuple[int, int]], list[float]]:
    """Of each edge its state and move, which kin have in common, and the covariance of its noise and that of its kin.

    Raises:
        InputError: kin have one noise, so that nothing tells them apart.
    """
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
                kin[node], alike[node] = (left_by(tree, node), ordinal), shared
    return [kin[i] for i in edges], [alike[i] for i in edges]
