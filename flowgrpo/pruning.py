"""Which edges leave the update: what is not finite, and BranchGRPO's prunings (arXiv 2509.06040), by whole chains.

A *chain* is the unbranched rest of a trajectory below its last split; the split's own edges are no part of it. Rollout,
rewards and advantages are as without pruning. Each rule keeps equally many edges whatever the rewards, so that all
processes keep in step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from flowgrpo.credit import Units, trunk_ends
from flowgrpo.parts import of_edges
from samplers.trees import Tree, pruned

if TYPE_CHECKING:
    from flowgrpo.config import Config

Tensor = torch.Tensor


def updated(config: Config, tree: Tree, units: Units, advantages: Tensor, trained: Tensor, iteration: int) -> Tree:
    """The tree whose evaluations the update replays: without what leaves the update, and dealt to parts if edges are.

    They are the rollout's own, and the drift is exactly 0, where all its edges are trained and both have calls of one size;
    otherwise they are gathered anew into calls of `train.micro_batch`.

    Args:
        advantages: (U,) of units, NaN where the reward was lost.
        trained: (U,) bool, whether the edges of each are trained on.
    """
    keep, train = finite(tree), config.train
    left = config.algorithm.tree.pruned(tree, units.to_edges(advantages))
    if left is not None:
        keep &= left
    if not trained.all():
        keep &= units.to_edges(trained)
    if train.split == "edges":
        parts = of_edges(tree, keep, train.updates, config.run.seed, iteration)
        return pruned(tree, keep, train.micro_batch, parts)
    whole = keep.all() and train.rollout_rows == train.micro_batch
    return tree if whole else pruned(tree, keep, train.micro_batch)


def finite(tree: Tree) -> Tensor:
    """Whether (nodes,) the edge to each node can be trained on: not where its states or log-probability are not finite.

    Weight 0 would not do, for 0 x NaN is NaN in every gradient it meets. The log-probability tells for all: it is made
    of the state, the velocity and the next state.
    """
    keep = torch.ones(len(tree.nodes), dtype=torch.bool)
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            keep[edges.nodes] = edges.log_prob.isfinite().cpu()
    return keep


def parent_top1(tree: Tree, advantages: Tensor) -> Tensor:
    """Of the chains that leave one split, only the best stays; (nodes,) whether the edge to each node does.

    The paper's rule. The released code keeps the first half of every chain instead, for advantages along it are equal.

    Args:
        advantages: (nodes,) of the edge to each node; NaN where its reward was lost.
    """
    by_split = defaultdict(list)
    for chain in chains(tree):
        child = tree.nodes[chain[-1]].parent
        by_split[tree.nodes[child].parent].append(chain)
    losing = [chain for group in by_split.values() for chain in _ranked(group, advantages)[1:]]
    return _without(tree, losing)


def extremes(tree: Tree, advantages: Tensor, fraction: float) -> Tensor:
    """Of the chains of a group, the best and the worst `fraction` of them stay; (nodes,) whether an edge does.

    Args:
        advantages: (nodes,) of the edge to each node; NaN where its reward was lost.
        fraction: below half; 0.25 keeps every other chain.
    """
    by_group = defaultdict(list)
    for chain in chains(tree):
        by_group[tree.nodes[chain[0]].root.group].append(chain)
    losing = []
    for group in by_group.values():
        count = max(1, round(fraction * len(group)))
        losing += _ranked(group, advantages)[count : len(group) - count]
    return _without(tree, losing)


def chains(tree: Tree) -> list[list[int]]:
    """For each leaf the edges below its last split, last first."""
    children = torch.zeros(len(tree.nodes), dtype=torch.long)
    for node in tree.nodes:
        if node.parent is not None:
            children[node.parent] += 1
    found = []
    for place in trunk_ends(tree):
        line = tree.ancestry(tree.leaves[place])
        found.append(line[: next(i for i, edge in enumerate(line) if children[tree.nodes[edge].parent] > 1)])
    return [chain for chain in found if chain]


def _ranked(group: list[list[int]], advantages: Tensor) -> list[list[int]]:
    """Best first, ties in order of growth; chains whose reward was lost are neither good nor bad: in the middle."""
    known = [chain for chain in group if not advantages[chain[-1]].isnan()]
    lost = [chain for chain in group if advantages[chain[-1]].isnan()]
    known.sort(key=lambda chain: -float(advantages[chain[-1]]))
    middle = math.ceil(len(known) / 2)
    return [*known[:middle], *lost, *known[middle:]]


def _without(tree: Tree, dropped: list[list[int]]) -> Tensor:
    keep = torch.ones(len(tree.nodes), dtype=torch.bool)
    keep[[edge for chain in dropped for edge in chain]] = False
    return keep
