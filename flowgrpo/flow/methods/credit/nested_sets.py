"""Credit for trees by nested comparisons: an edge with all edges of its step, and with ever closer relatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.credit.rules import Credit, parent_of, paths_of, stochastic_edges, trunk_ends
from flowgrpo.schema.imports.heavy import Tensor
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.tree_credit import NestedWeights, leaving_splits, nested_units

if TYPE_CHECKING:
    from samplers.trees import Tree


class Nested(NestedWeights, Credit):
    """Give each edge the mean reward of the ends below it; compare it with nested sets of edges of the same step.

    The sets of an edge, from large to small: all edges of the step; families, which are the edges below the same start
    or below the same child of an earlier split; and siblings. A weight of 0 leaves a comparison out, and sets that are the
    same count once. The mean of a set leaves out the edge's own leaves, see
    `training.advantages.comparison_sets.nested_leave_one_out`. If it included them, n of N, the edge's gradient would be
    scaled by 1 - n / N: by 0.5 at the first split of one binary tree, by 0.94 at its fourth. Needs the baseline
    leave_one_out.

    With other weights, and with the own leaves in the means, it is the credit of TEMPO (arXiv 2509.18314), SPO of segments
    (arXiv 2505.23564), TreePO (arXiv 2508.17445), GiGPO (arXiv 2505.10978) and HGPO (arXiv 2602.22817).
    """

    name: Literal["nested"] = "nested"
    starts: bool = False
    """For likelihood elbo: also compare the trees of a group with each other, as siblings, and give credit to no other edges
    than those that leave a start or a split."""

    @override
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        paths = paths_of(tree)
        on_path = set(paths.edges)
        edges = [i for i in stochastic_edges(tree) if i in on_path]
        roots: set[int] = set()  # edges that leave a start alone, whose siblings are the other trees
        if self.starts:
            splits = leaving_splits(paths, on_path)
            roots = {line[-1] for line in paths.lines} - splits
            edges = sorted(roots | splits)
        kin, alike = _kin(tree, edges)
        return nested_units(
            paths,
            rewards[trunk_ends(tree)],
            edges=edges,
            depth=len(tree.sigmas),
            group=self.group,
            between=self.between,
            siblings=self.siblings,
            starts=roots,
            kin=kin,
            alike=alike,
        )


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
