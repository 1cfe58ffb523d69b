"""BranchGRPO's prunings (arXiv 2509.06040): remove whole chains from the update.

A *chain* here is the unbranched end of a trajectory below its last split, without the edges of the split. Rollout,
rewards and advantages are the same as without pruning. The number of edges that a rule keeps does not depend on the
rewards, so that all processes do the same number of steps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from flowgrpo.flow.methods.credit.rules import parent_of, trunk_ends
from flowgrpo.schema.imports.heavy import Tensor, torch

if TYPE_CHECKING:
    from samplers.trees import Tree


def parent_top1(tree: Tree, advantages: Tensor) -> Tensor:
    """Return a mask (nodes,) of the edges that stay if only the best of the chains below each last split is kept.

    This is the paper's rule. The released code keeps the first half of every chain instead; advantages along a chain
    are equal. `advantages` (nodes,) is the advantage of the edge to each node, NaN if its reward was lost.
    """
    by_split = defaultdict(list)
    for chain in chains(tree):
        by_split[parent_of(tree, parent_of(tree, chain[-1]))].append(chain)
    losing = [chain for group in by_split.values() for chain in _rank(group, advantages)[1:]]
    return _keep_all_but(tree, losing)


def extremes(tree: Tree, advantages: Tensor, fraction: float) -> Tensor:
    """Return a mask as `parent_top1` does, but keep the best and the worst `fraction` (< 0.5) of a group's chains."""
    by_group = defaultdict(list)
    for chain in chains(tree):
        by_group[tree.nodes[chain[0]].root.group].append(chain)
    losing = []
    for group in by_group.values():
        count = max(1, round(fraction * len(group)))
        losing += _rank(group, advantages)[count : len(group) - count]
    return _keep_all_but(tree, losing)


def chains(tree: Tree) -> list[list[int]]:
    """Return the chain of each trajectory end as a list of edges, last edge first; leave out empty chains."""
    children = Counter(node.parent for node in tree.nodes)
    every = []
    for index in trunk_ends(tree):
        line = tree.ancestry(tree.leaves[index])
        every.append(line[: next(i for i, edge in enumerate(line) if children[tree.nodes[edge].parent] > 1)])
    return [chain for chain in every if chain]


def _rank(group: list[list[int]], advantages: Tensor) -> list[list[int]]:
    """Sort chains by falling advantage; equal ones keep their order, and chains of lost reward go to the middle."""
    known = [chain for chain in group if not advantages[chain[-1]].isnan()]
    lost = [chain for chain in group if advantages[chain[-1]].isnan()]
    known.sort(key=lambda chain: -float(advantages[chain[-1]]))
    middle = math.ceil(len(known) / 2)
    return [*known[:middle], *lost, *known[middle:]]


def _keep_all_but(tree: Tree, dropped: list[list[int]]) -> Tensor:
    keep = torch.ones(len(tree.nodes), dtype=torch.bool)
    keep[[edge for chain in dropped for edge in chain]] = False
    return keep
