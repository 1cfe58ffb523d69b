"""Build the tree of an engine's chains and score it with our model, in the form that our own rollout returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from samplers.batches import batched
from samplers.kernels import State, log_prob
from samplers.trees import TRUNK, Edges, Evaluate, Evaluation, Node, Plan, Root, Tree, edge_transition


@dataclass(frozen=True)
class Chains:
    """Chains as a tree without `samples`, since the engine decodes them.

    Attributes:
        root_of: index of the root of each node.
    """

    tree: Tree
    root_of: list[int]

    @property
    def leaves(self) -> list[int]:
        """Index of the root of each leaf."""
        return [self.root_of[leaf] for leaf in self.tree.leaves]


@torch.no_grad()
def chains_of(
    plan: Plan,
    sigmas: Sequence[float],
    roots: Sequence[Root],
    states: Mapping[int, torch.Tensor],
    *,
    velocity: Evaluate,
    dtype: torch.dtype,
    micro_batch: int,
    keep_means: bool = False,
) -> Chains:
    """Return an engine's chains, with the log-probabilities of their trained edges under our model.

    Nodes, evaluations and their order are those of `samplers.growth.grow`. So the update replays exactly the calls made
    here, and its ratio begins at exactly 1. Steps that are not trained are not evaluated.

    Args:
        plan: one move with one child for each step.
        states: step -> states (R, ...) before it, for each trained step and the step after it, on the model's device.
        velocity: evaluates our model.
        dtype: dtype of the model's input. Next states are scored in the dtype that the engine sent.
        micro_batch: largest number of rows in one evaluation.
        keep_means: whether trained edges keep the mean of their step.
    """
    tree = Tree(tuple(sigmas), [Node(None, root, (root.index,), TRUNK, sigmas[0], 0) for root in roots])
    root_of, reached = list(range(len(roots))), list(range(len(roots)))
    parts = sorted({root.part for root in roots})
    batches = [
        batch
        for part in parts
        for batch in batched([i for i, root in enumerate(roots) if root.part == part], micro_batch)
    ]
    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        (move,) = plan(TRUNK, step)
        for batch in batches:
            nodes = range(len(tree.nodes), len(tree.nodes) + len(batch))
            rows = [roots[i].row for i in batch]
            edges = Edges(move, sigma_next, torch.arange(len(batch)), torch.tensor(nodes), None, None)
            evaluation = Evaluation(sigma, rows, roots[batch[0]].part, None, [edges])
            if move.trained:
                evaluation.state = (states[step][batch].to(dtype),)
                edges.next_state = (states[step + 1][batch],)
                _score(tree, evaluation, velocity, keep_means)
            for i, node in zip(batch, nodes, strict=True):
                tree.nodes.append(Node(reached[i], roots[i], tree.nodes[i].path, TRUNK, sigma_next, step + 1))
                root_of.append(i)
                reached[i] = node
            tree.evaluations.append(evaluation)
    tree.leaves = [reached[i] for batch in batches for i in batch]
    return Chains(tree, root_of)


def _score(tree: Tree, evaluation: Evaluation, velocity: Evaluate, keep_means: bool) -> None:
    """Set the log-probabilities of an evaluation's edges and, with `keep_means`, the means of their step."""
    (edges,), state = evaluation.edges, evaluation.state
    assert state is not None
    assert edges.next_state is not None
    moved: State = velocity(state, evaluation.sigma, evaluation.rows)
    mean, std = edge_transition(edges, evaluation.sigma, state, moved, tree.sigma_cap)
    edges.log_prob = log_prob(edges.next_state, mean, std, edges.move.kernel.log_prob)
    edges.mean = mean if keep_means else None
