"""Samples that a snapshot makes beside stored ones: each in the place of the worse one of a stored pair (SePPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.rollout import walk
from samplers.trees import Root, Tree


def losers(tree: Tree, advantages: torch.Tensor, keep: torch.Tensor) -> list[int]:
    """The worse leaf of each group's pair.

    Args:
        advantages: (leaves,) of the samples.
        keep: (leaves,) bool, whether each is of a pair.
    """
    pairs: dict[int, list[int]] = {}
    for leaf in keep.nonzero().flatten().tolist():
        pairs.setdefault(root_of(tree, leaf).group, []).append(leaf)
    return [min(pair, key=lambda leaf: float(advantages[leaf])) for pair in pairs.values()]


def root_of(tree: Tree, leaf: int) -> Root:
    """The root of a leaf."""
    return tree.nodes[tree.leaves[leaf]].root


def resampled(
    config: Config, policy: Policy, tree: Tree, leaves: Sequence[int], *, rows: Sequence[Row], iteration: int
) -> Tree:
    """The tree with samples of the policy as it stands in the place of some leaves'.

    Args:
        leaves: whose samples are made anew, of chains; one of a group at most.
        rows: of each, with the seed that its chain starts from.
        iteration: with the seed of the run, the head of the address of the chains' noise.
    """
    if not leaves:
        return tree
    algorithm, train, seed = config.algorithm, config.train, config.run.seed
    made = walk(
        policy,
        algorithm.plan(algorithm.kernel.kernels(len(policy.sigmas) - 1), train.group_size, seed, iteration),
        [replace(root_of(tree, leaf), row=row) for leaf, row in zip(leaves, rows, strict=True)],
        micro_batch=train.rollout_rows,
        seed=seed,
        iteration=iteration,
        solver=algorithm.solver,
    )
    places = {root_of(tree, leaf).group: leaf for leaf in leaves}
    order = [places[root_of(made, leaf).group] for leaf in range(len(made.leaves))]
    samples = []
    for stored, own in zip(tree.samples, made.samples, strict=True):
        samples.append(stored.clone())
        samples[-1][order] = own.to(stored)
    return replace(tree, samples=tuple(samples))
