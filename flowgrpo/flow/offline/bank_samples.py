"""Samples of a bank's snapshot that replace the worse sample of each stored pair (SePPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.rollout import walk
from samplers.trees import Root, Tree


def find_losers(tree: Tree, advantages: torch.Tensor, keep: torch.Tensor) -> list[int]:
    """Return the index of the worse leaf of each group's pair; `keep` (leaves,) is a mask of the members of pairs."""
    pairs: dict[int, list[int]] = {}
    for leaf in keep.nonzero().flatten().tolist():
        pairs.setdefault(root_of(tree, leaf).group, []).append(leaf)
    return [min(pair, key=lambda leaf: float(advantages[leaf])) for pair in pairs.values()]


def root_of(tree: Tree, leaf: int) -> Root:
    """Return the root of a leaf."""
    return tree.nodes[tree.leaves[leaf]].root


def resample(
    config: Config, policy: Policy, tree: Tree, leaves: Sequence[int], *, rows: Sequence[Row], iteration: int
) -> Tree:
    """Return the tree with new samples of the current policy in place of those of `leaves`, at most one in a group.

    `rows` are the leaves' rows, but with the seeds of the new chains. `iteration` is part of the new noise's address.
    """
    if not leaves:
        return tree
    algorithm, train, seed = config.algorithm, config.train, config.run.seed
    rollout = walk(
        policy,
        algorithm.plan(algorithm.kernel.kernels(len(policy.sigmas) - 1), train.group_size, seed, iteration),
        [replace(root_of(tree, leaf), row=row) for leaf, row in zip(leaves, rows, strict=True)],
        micro_batch=train.rollout_rows,
        seed=seed,
        iteration=iteration,
    )
    places = {root_of(tree, leaf).group: leaf for leaf in leaves}
    order = [places[root_of(rollout, leaf).group] for leaf in range(len(rollout.leaves))]
    samples = []
    for stored, new in zip(tree.samples, rollout.samples, strict=True):
        samples.append(stored.clone())
        samples[-1][order] = new.to(stored)
    return replace(tree, samples=tuple(samples))
