"""Truncated importance weights of a flow's edges that an engine sampled; see `flowgrpo_engine.mismatch`.

With `algorithm.kernel.log_prob: mean`, log-probabilities are means over the D dimensions of a state. The weight of an edge
is then the D-th root of the true ratio, so C = 2 bounds the true ratio by 2^D. Only an engine that computes something else
exceeds that. The reported mismatch does not depend on `log_prob`. It compares densities, per dimension and jointly over all
dimensions and trained steps of a sample; the joint ratio would be a sample's weight without truncation.
"""

from __future__ import annotations

import math

import torch

from flowgrpo_engine.mismatch import Mismatch, clip_weights
from samplers.kernels import slope
from samplers.trees import Edges, Evaluation, Tree


def edge_weights(tree: Tree, engine: torch.Tensor, truncate: float) -> torch.Tensor:
    """Return weights (nodes,) of the edges to each node, float64; 1 for edges that are not trained.

    Args:
        engine: (nodes,) log-probability of each edge under the engine, in the `log_prob` form of the edge's kernel.
        truncate: C, the largest weight.
    """
    weights = torch.ones(len(tree.nodes), dtype=torch.float64)
    for _, edges in _trained_edges(tree):
        assert edges.log_prob is not None
        difference = edges.log_prob.double().cpu() - engine[edges.nodes]
        weights[edges.nodes] = clip_weights(difference, truncate)
    return weights


def mismatch(tree: Tree, engine: torch.Tensor, truncate: float) -> Mismatch:
    """Return the mismatch between the trained policy and the engine over the edges with finite log-probabilities.

    Args:
        engine: as of `edge_weights`.
        truncate: C, the largest weight.
    """
    differences, weights, cut = [], [], 0
    joint = torch.zeros(len(tree.nodes), dtype=torch.float64)  # log-ratio of the edge to each node
    for evaluation, edges in _trained_edges(tree):
        assert edges.next_state is not None
        assert edges.log_prob is not None
        dimensions = sum(x[0].numel() for x in edges.next_state)
        gap = edges.log_prob.double().cpu() - engine[edges.nodes]
        known = gap.isfinite()
        density = gap * _per_dimension(tree, evaluation, edges, dimensions)
        joint[edges.nodes] = torch.where(known, density, 0.0) * dimensions
        differences.append(density[known])
        weights.append(clip_weights(gap[known], truncate))
        cut += int((gap[known] > math.log(truncate)).sum())
    return Mismatch(
        each=torch.cat(differences),
        joint=torch.stack([joint[tree.ancestry(leaf)].sum() for leaf in tree.leaves]),
        weights=torch.cat(weights),
        truncated=cut,
    )


def _trained_edges(tree: Tree) -> list[tuple[Evaluation, Edges]]:
    return [(evaluation, edges) for evaluation in tree.evaluations for edges in evaluation.trained]


def _per_dimension(tree: Tree, evaluation: Evaluation, edges: Edges, dimensions: int) -> float:
    """Return the factor from a log-ratio in the kernel's `log_prob` form to a log-ratio of densities per dimension."""
    form = edges.move.kernel.log_prob
    if form == "sum":
        return 1 / dimensions
    if form == "mean":
        return 1.0
    _, std = slope(edges.move.kernel, evaluation.sigma, edges.sigma_next, tree.sigma_cap)
    return 1 / (2 * std**2)
