"""The tree that an update replays: the trained edges and their model calls."""

from __future__ import annotations

import logging

import torch

from flowgrpo.flow.config import Config
from flowgrpo.flow.updates import rollout_graphs
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.distributed.minibatches import of_edges
from samplers.pruning import prune
from samplers.trees import Tree

Tensor = torch.Tensor
LOGGER = logging.getLogger(__name__)


def build_replay_tree(
    config: Config, tree: Tree, *, units: CreditUnits, advantages: Tensor, trained: Tensor, iteration: int
) -> Tree:
    """Return the tree whose evaluations the update replays, without the edges that leave the update.

    With `train.split: edges` each edge is assigned to a part of the update here. With another split `tree` itself is
    returned if all edges are trained and the batch sizes of rollout and update are equal. Then the update repeats the
    rollout's evaluations, and its log ratios before the first optimizer step are exactly 0. Otherwise edges are
    collected into new calls of `train.micro_batch` rows. `advantages` (U,) are NaN where the reward was lost;
    `trained` (U,) is a mask of the units to train on.
    """
    keep, train = finite(tree), config.train
    if broken := int((~keep).sum()):
        LOGGER.warning("%d steps of samples have a log-probability that is not finite and are not trained on", broken)
    not_pruned = config.algorithm.tree.kept_edges(tree, units.to_edges(advantages))
    if not_pruned is not None:
        keep &= not_pruned
    if not trained.all():
        keep &= units.to_edges(trained)
    fits = all(len(e.rows) <= train.update_rows for e in tree.evaluations if e.trained)  # update_rows may be halved
    if train.split != "edges" and keep.all() and train.rollout_rows == train.update_rows and fits:
        return tree
    rollout_graphs.drop(tree.evaluations)
    parts = None
    if train.split == "edges":
        parts = of_edges(tree, keep, updates=train.updates, seed=config.run.seed, iteration=iteration)
    return prune(tree, keep, train.update_rows, parts)


def finite(tree: Tree) -> Tensor:
    """Return a mask (nodes,) of the edges with a finite log-probability, and so with finite state and velocity.

    Other edges must leave the update: even with weight 0 their gradient is NaN, since 0 x NaN is NaN.
    """
    keep = torch.ones(len(tree.nodes), dtype=torch.bool)
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            assert edges.log_prob is not None
            keep[edges.nodes] = edges.log_prob.isfinite().cpu()
    return keep
