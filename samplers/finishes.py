"""Finishes: growth of trees whose last ODE steps are taken separately, several steps in one call.

If only ODE steps lead from a node to the end, no gradient and no log-probability is needed. These steps may use a
cheaper form of the model. They may also keep state between steps, since all steps of a call have the same rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from samplers.batches import batched
from samplers.growth import grow
from samplers.kernels import State
from samplers.trees import Edges, Evaluation, Move, Node, Plan, Root, Tree, stack_states


class Finish(Protocol):
    """A function that takes the last ODE steps, such as a policy's `finish`."""

    def __call__(self, state: State, sigmas: Sequence[float], rows: Sequence[Any]) -> State:
        """Return the state (B, ...) after ODE steps along `sigmas`, for the B conditions `rows`."""


def grow_and_finish(
    plan: Plan, sigmas: Sequence[float], roots: Sequence[Root], *, micro_batch: int, finish: Finish, **growth: Any
) -> Tree:
    """Grow trees as `grow` does, but take the last ODE steps with `finish`.

    The tree has a node and an evaluation for every index in `Move.ode_stops`, as after `grow`. Trained evaluations have
    the same rows as in `grow`. Untrained states may be batched differently, so their results may differ in the last
    bits.
    """
    held: dict[int, tuple[Move, State]] = {}
    tree = grow(plan, sigmas, roots, micro_batch=micro_batch, held=held, **growth)
    together = defaultdict(list)
    for i, (move, _) in held.items():
        together[tree.nodes[i].step, tree.nodes[i].root.part, move].append(i)
    finals = [tree.samples] if tree.leaves else []
    for (step, _, move), alike in together.items():
        assert move.ode_stops is not None  # `grow` holds only such moves
        stops = (step, *move.ode_stops)
        for batch in batched(alike, micro_batch):
            state = stack_states([held.pop(i)[1] for i in batch])
            rows = [tree.nodes[i].root.row for i in batch]
            finals.append(finish(state, [tree.sigmas[stop] for stop in stops], rows))
            tree.leaves += _record(tree, batch, rows, move)
    tree.samples = tuple(torch.cat(column) for column in zip(*finals, strict=True))
    return tree


def _record(tree: Tree, batch: Sequence[int], rows: list[Any], move: Move) -> list[int]:
    """Add the nodes and evaluations of one call of `finish` to the tree; return the indices of its nodes at sigma 0."""
    nodes = list(batch)
    assert move.ode_stops is not None
    for place, stop in enumerate(move.ode_stops):
        first, before, sigma = len(tree.nodes), tree.nodes[nodes[0]], tree.sigmas[stop]
        for i in nodes:
            node = tree.nodes[i]
            tree.nodes.append(Node(i, node.root, node.path, move.role, sigma, stop, move.ode_stops[place + 1 :]))
        nodes = list(range(first, len(tree.nodes)))
        taken = replace(move, ode_stops=move.ode_stops[place:])
        edges = Edges(taken, sigma, torch.arange(len(nodes)), torch.tensor(nodes), None, None)
        tree.evaluations.append(Evaluation(before.sigma, rows, before.root.part, None, [edges]))
    return nodes
