"""The correction of a flow's edges that an engine walked; what it is, and what is told: `flowgrpo_engine.mismatch`.

With `algorithm.kernel.log_prob: mean` the log-probabilities of an edge are means over the D dimensions of a state, so its
weight is the D-th root of the true one, and C bounds that: 2 then stands for 2^D, and is met by nothing but an engine that
does something else. What is told does not depend on that form: it is the mismatch of densities, per dimension, and of the
joint one of all dimensions and trained steps of a sample, by which samples would be weighed without truncation.
"""

from __future__ import annotations

import math

import torch

from flowgrpo_engine.mismatch import Mismatch, truncated
from samplers.kernels import slope
from samplers.trees import Edges, Evaluation, Tree


def edge_weights(tree: Tree, engine: torch.Tensor, truncate: float) -> torch.Tensor:
    """Return weights (nodes,) of the edges to each node, float64; 1 for edges that are not trained.

    Args:
        engine: (nodes,) log-probability of each edge under the engine, in the form that its kernel has here.
        truncate: C, the largest weight.
    """
    weights = torch.ones(len(tree.nodes), dtype=torch.float64)
    for _, edges in _trained(tree):
        assert edges.log_prob is not None
        difference = edges.log_prob.double().cpu() - engine[edges.nodes]
        weights[edges.nodes] = truncated(difference, truncate)
    return weights


def mismatch(tree: Tree, engine: torch.Tensor, truncate: float) -> Mismatch:
    """How far the trained policy is from the engine, by edges that are finite.

    Args:
        engine: as of `edge_weights`.
        truncate: C, the largest weight.
    """
    differences, weights, cut = [], [], 0
    joint = torch.zeros(len(tree.nodes), dtype=torch.float64)  # of the way to each node
    for evaluation, edges in _trained(tree):
        assert edges.next_state is not None
        assert edges.log_prob is not None
        dimensions = sum(x[0].numel() for x in edges.next_state)
        gap = edges.log_prob.double().cpu() - engine[edges.nodes]
        known = gap.isfinite()
        density = gap * _per_dimension(tree, evaluation, edges, dimensions)
        joint[edges.nodes] = torch.where(known, density, 0.0) * dimensions
        differences.append(density[known])
        weights.append(truncated(gap[known], truncate))
        cut += int((gap[known] > math.log(truncate)).sum())
    return Mismatch(
        each=torch.cat(differences),
        joint=torch.stack([joint[tree.ancestry(leaf)].sum() for leaf in tree.leaves]),
        weights=torch.cat(weights),
        truncated=cut,
    )


def _trained(tree: Tree) -> list[tuple[Evaluation, Edges]]:
    return [(evaluation, edges) for evaluation in tree.evaluations for edges in evaluation.trained]


def _per_dimension(tree: Tree, evaluation: Evaluation, edges: Edges, dimensions: int) -> float:
    """The factor from a difference in an edge's form of the log-probability to that of densities, per dimension."""
    form = edges.move.kernel.log_prob
    if form == "sum":
        return 1 / dimensions
    if form == "mean":
        return 1.0
    _, std = slope(edges.move.kernel, evaluation.sigma, edges.sigma_next, tree.sigma_cap)
    return 1 / (2 * std**2)
