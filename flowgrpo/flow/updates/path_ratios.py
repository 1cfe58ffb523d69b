"""Log ratios summed along the path to each edge and over whole trajectories, in the replay of an optimizer step."""

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
    Whole trajectories are known only after a pass over all evaluations, see `join`.
    """

    def __init__(self, tree: Tree):
        replayed = {n for e in tree.evaluations for edges in e.trained for n in edges.nodes.tolist()}
        self._replayed = sorted(replayed)  # parents before children
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
        self._through = torch.zeros(2, root + 1, dtype=torch.float64)

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

    def join(self) -> None:
        """Set `whole` and `length` of all edges from the log ratios added so far; 0 where none were added."""
        above, total, count = self._above.tolist(), self._sum.tolist(), self._position.tolist()
        through = [[0.0, 0.0, 0.0] for _ in total]  # sums over the trajectories through each edge, and their number
        for node in reversed(self._replayed):
            if not through[node][2]:
                through[node] = [total[node], count[node], 1.0]
            through[above[node]] = [a + b for a, b in zip(through[above[node]], through[node], strict=True)]
        sums = torch.tensor(through, dtype=torch.float64).T
        self._through = sums[:2] / sums[2].clamp(min=1)

    def whole(self, edges: Edges) -> Tensor:
        """Return the sum (E,) of the log ratios of each edge's trajectory; float64, without gradient.

        Above a split it is the mean over the trajectories through the edge.
        """
        return self._through[0, edges.nodes]

    def length(self, edges: Edges) -> Tensor:
        """Return the number (E,) of trained edges of each edge's trajectory, a mean as in `whole`; float64."""
        return self._through[1, edges.nodes]
