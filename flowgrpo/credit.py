"""Which edge earned the reward: from the rewards of a tree's leaves to units that can be compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flowgrpo.errors import InputError
from samplers.trees import Tree


@dataclass(frozen=True)
class Units:
    """The things that are compared: a trajectory, a branch, a step's gain.

    Attributes:
        values: (U, R) float64, one column per reward; NaN where a reward does not apply or was lost.
        comparison: (U,) integer of the set a unit is compared within.
        weight: (U,) float64 weight of its edges in the loss.
        of_edge: (nodes,) unit that the edge to each node belongs to, -1 for none.
    """

    values: torch.Tensor
    comparison: torch.Tensor
    weight: torch.Tensor
    of_edge: torch.Tensor


def terminal(tree: Tree, rewards: torch.Tensor) -> Units:
    """Every edge of a trajectory shares the reward of its end; trajectories of one group are compared.

    Flow-GRPO (arXiv 2505.05470), DanceGRPO, MixGRPO.

    Args:
        rewards: (leaves, R) float64 in the order of `tree.leaves`.

    Raises:
        InputError: trajectories share an edge, so that no single end has earned its reward.
    """
    of_edge = torch.full((len(tree.nodes),), -1)
    for unit, leaf in enumerate(tree.leaves):
        for edge in tree.ancestry(leaf):
            if of_edge[edge] >= 0:
                raise InputError(
                    "algorithm.credit: terminal needs a tree whose trajectories share no edge, such as chain"
                )
            of_edge[edge] = unit
    group = torch.tensor([tree.nodes[leaf].root.group for leaf in tree.leaves])
    return Units(rewards, group, torch.ones(len(group), dtype=torch.float64), of_edge)
