"""Log ratios summed along the path to each edge, while an optimizer step replays from noise to data."""

from __future__ import annotations

import torch

from flowgrpo.training.advantages.clipped_ratio import LIMIT
from samplers.trees import Edges, Tree

Tensor = torch.Tensor


class PathRatios:
    """Sums of the log ratios of the trained edges above each node, under the weights of one optimizer step.

    Rollout and replay order evaluations by sigma, and all edges of a start are in one part of the update. So an edge
    comes after all edges above it, and the sums need no further evaluations. Steps that are not replayed are left out:
    ODE steps, which have no density, untrained steps (`train_fraction`), and steps without a finite log-probability.
    """

    def __init__(self, tree: Tree):
        replayed = {n for e in tree.evaluations for edges in e.trained for n in edges.nodes.tolist()}
        root = len(tree.nodes)  # index that stands for the start of every path
        above: list[int] = []
        count = [0] * (root + 1)
        for index, node in enumerate(tree.nodes):
            parent = node.parent
            above.append(root if parent is None else parent if parent in replayed else above[parent])
            count[index] = count[above[index]] + 1
        self._above = torch.tensor(above)
        self._position = torch.tensor(count)
        self._sum = torch.zeros(root + 1, dtype=torch.float64)

    def position(self, edges: Edges) -> Tensor:
        """Return the number (E,) of trained edges on the path to each edge, including the edge itself."""
        return self._position[edges.nodes]

    def earlier(self, edges: Edges) -> Tensor:
        """Return the sum (E,) of the log ratios of the trained edges above each edge; float64, without gradient."""
        return self._sum[self._above[edges.nodes]]

    @torch.no_grad()
    def add(self, edges: Edges, log_ratio: Tensor) -> None:
        """Add the log ratios (E,) of edges, each clamped to +-20, to the sums at their nodes."""
        self._sum[edges.nodes] = self.earlier(edges) + log_ratio.clamp(-LIMIT, LIMIT).double().cpu()
