"""Three policies, and what lies between two of them: the engine that acted, and the trained one as it stood then.

The update compares the policy with the trained one at the rollout (old), as it does without an engine. That the samples are
another policy's is mended by a weight of each edge, min(exp(log p_old - log p_engine), C), without gradient: truncated
importance sampling (Espeholt et al., arXiv 1802.01561; for language models verl's rollout correction). With
`algorithm.kernel.log_prob: mean` both are means over the D dimensions of a state, so the weight is the D-th root of the true
one, and C bounds that: 2 then stands for 2^D, and is met by nothing but an engine that does something else.

What is told of the mismatch does not depend on that form: it is that of densities, per dimension, and of the joint one of
all dimensions and trained steps of a sample, by which samples would be weighed without truncation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samplers.kernels import slope
from samplers.trees import Edges, Evaluation, Tree


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Differences log p_old - log p_engine of a process's trained edges.

    Attributes:
        per_dimension: (E,) of densities, means over the dimensions.
        joint: (R,) of the densities of whole samples.
        dimensions: of a state.
        weights: (E,) of the edges, truncated.
        truncated: how many were.
    """

    per_dimension: torch.Tensor
    joint: torch.Tensor
    dimensions: int
    weights: torch.Tensor
    truncated: int


def edge_weights(tree: Tree, engine: torch.Tensor, truncate: float) -> torch.Tensor:
    """Weights (nodes,) of the edges to each node, float64; 1 for edges that are not trained.

    Args:
        engine: (nodes,) log-probability of each edge under the engine, in the form that its kernel has here.
        truncate: C, the largest weight.
    """
    weights = torch.ones(len(tree.nodes), dtype=torch.float64)
    for _, edges in _trained(tree):
        difference = edges.log_prob.double().cpu() - engine[edges.nodes]
        weights[edges.nodes] = difference.clamp(max=math.log(truncate)).exp()
    return weights


def mismatch(tree: Tree, engine: torch.Tensor, truncate: float) -> Mismatch:
    """How far the trained policy is from the engine, by edges that are finite; arguments as of `edge_weights`."""
    differences, weights, truncated, dimensions = [], [], 0, 1
    joint = torch.zeros(len(tree.nodes), dtype=torch.float64)  # of the way to each node
    for evaluation, edges in _trained(tree):
        dimensions = sum(x[0].numel() for x in edges.next_state)
        gap = edges.log_prob.double().cpu() - engine[edges.nodes]
        known = gap.isfinite()
        density = gap * _per_dimension(tree, evaluation, edges, dimensions)
        joint[edges.nodes] = torch.where(known, density, 0.0) * dimensions
        differences.append(density[known])
        weights.append(gap[known].clamp(max=math.log(truncate)).exp())
        truncated += int((gap[known] > math.log(truncate)).sum())
    return Mismatch(
        per_dimension=torch.cat(differences),
        joint=torch.stack([joint[tree.ancestry(leaf)].sum() for leaf in tree.leaves]),
        dimensions=dimensions,
        weights=torch.cat(weights),
        truncated=truncated,
    )


def metrics(everyone: Sequence[Mismatch]) -> dict[str, float | None]:
    """What a line of metrics says of the mismatch on all processes; None where no edge is finite.

    `engine/kl` estimates the divergence of the trained policy from the engine, in nats per dimension of a step, by the mean
    of log p_engine - log p_old, and `engine/kl_joint` in nats of a whole sample. `engine/effective_samples` is the effective
    sample size (Kish), as a part of all, of edges weighed by their ratios per dimension, untruncated; of
    `engine/effective_samples_joint` of samples weighed by their true ratios.
    """
    gaps = torch.cat([each.per_dimension for each in everyone])
    joint = torch.cat([each.joint for each in everyone])
    weights = torch.cat([each.weights for each in everyone])
    if not len(gaps):
        return dict.fromkeys(NAMES)
    values = (
        gaps.abs().mean(),
        gaps.abs().max(),
        -gaps.mean(),
        -joint.mean(),
        effective(gaps),
        effective(joint),
        weights.mean(),
        sum(each.truncated for each in everyone) / len(weights),
    )
    return dict(zip(NAMES, map(float, values), strict=True))


NAMES = tuple(
    f"engine/{name}"
    for name in (
        "mean_abs_log_ratio",
        "max_abs_log_ratio",
        "kl",
        "kl_joint",
        "effective_samples",
        "effective_samples_joint",
        "mean_weight",
        "truncated_fraction",
    )
)


def effective(log_weights: torch.Tensor) -> float:
    """The effective sample size of weights, given by their logarithms, as a part of their number: from 1 / n to 1."""
    total, squares = log_weights.logsumexp(0), (2 * log_weights).logsumexp(0)
    return float((2 * total - squares).exp()) / len(log_weights)


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
