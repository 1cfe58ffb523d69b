"""The tree that an update replays: which edges of a rollout it trains on, in which calls of the model."""

from __future__ import annotations

import logging

import torch

from flowgrpo.flow.config import Config
from flowgrpo.flow.updates import rollout_graphs
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.distributed.minibatches import of_edges
from samplers.pruning import pruned
from samplers.trees import Tree

Tensor = torch.Tensor
LOGGER = logging.getLogger(__name__)


def replayed(
    config: Config, tree: Tree, *, units: CreditUnits, advantages: Tensor, trained: Tensor, iteration: int
) -> Tree:
    """Return the tree whose evaluations the update replays, without the edges that leave the update.

    With `train.split: edges` its edges are dealt to the parts of the update here. The evaluations are the rollout's own, and
    the drift is exactly 0, where all its edges are trained in whole groups or samples and rollout and update have calls of
    one size; otherwise they are gathered anew into calls of `train.micro_batch`.

    Args:
        advantages: (U,) of units, NaN where the reward was lost.
        trained: (U,) bool, whether the edges of each are trained on.
    """
    keep, train = finite(tree), config.train
    if broken := int((~keep).sum()):
        LOGGER.warning("%d steps of samples have a log-probability that is not finite and are not trained on", broken)
    left = config.algorithm.tree.pruned(tree, units.to_edges(advantages))
    if left is not None:
        keep &= left
    if not trained.all():
        keep &= units.to_edges(trained)
    fits = all(len(e.rows) <= train.update_rows for e in tree.evaluations if e.trained)  # not once that was halved
    whole = train.split != "edges" and keep.all() and train.rollout_rows == train.update_rows and fits
    if whole:
        return tree
    rollout_graphs.drop(tree.evaluations)
    if train.split == "edges":
        parts = of_edges(tree, keep, updates=train.updates, seed=config.run.seed, iteration=iteration)
        return pruned(tree, keep, train.update_rows, parts)
    return pruned(tree, keep, train.update_rows)


def finite(tree: Tree) -> Tensor:
    """Whether (nodes,) the edge to each node can be trained on: not where its states or log-probability are not finite.

    Weight 0 would not do, for 0 x NaN is NaN in every gradient it meets. The log-probability tells for all: it is made
    of the state, the velocity and the next state.
    """
    keep = torch.ones(len(tree.nodes), dtype=torch.bool)
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            assert edges.log_prob is not None
            keep[edges.nodes] = edges.log_prob.isfinite().cpu()
    return keep
