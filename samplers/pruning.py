"""Pruned trees: the update drops some trained edges and regroups the remaining ones into full micro-batches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TypeVar

import torch

from samplers.batches import batched
from samplers.trees import Edges, Evaluation, Move, Tree, stack_states

T = TypeVar("T")


def prune(tree: Tree, keep: torch.Tensor, micro_batch: int, parts: torch.Tensor | None = None) -> Tree:
    """Return the tree with only the trained edges whose node is True in `keep` (nodes,), in full micro-batches.

    A row shares its batch with other rows than in the rollout, so its ratio is 1 only up to rounding. `parts` (nodes,)
    has the index of the optimizer step that trains each edge, equal for edges that leave the same state. If it is None,
    the edge's root decides (`Root.part`).
    """
    kept_rows: dict[tuple[int, float], list[tuple[Evaluation, int]]] = defaultdict(list)
    for evaluation in tree.evaluations:
        part_of = {
            row: evaluation.part if parts is None else int(parts[node])
            for edges in evaluation.trained
            for row, node in zip(edges.rows.tolist(), edges.nodes.tolist(), strict=True)
            if keep[node]
        }
        for row, part in sorted(part_of.items()):
            kept_rows[part, evaluation.sigma].append((evaluation, row))
    evaluations = [
        _gather(batch, part, keep) for (part, _), rows in kept_rows.items() for batch in batched(rows, micro_batch)
    ]
    return replace(tree, evaluations=evaluations)


def _gather(rows: list[tuple[Evaluation, int]], part: int, keep: torch.Tensor) -> Evaluation:
    taken: dict[Move, list[tuple[int, Edges, int]]] = defaultdict(list)  # move -> (new row, edges, index in edges)
    for new, (evaluation, row) in enumerate(rows):
        for edges in evaluation.trained:
            for index in ((edges.rows == row) & keep[edges.nodes]).nonzero().flatten().tolist():
                taken[edges.move].append((new, edges, index))
    return Evaluation(
        rows[0][0].sigma,
        [evaluation.rows[row] for evaluation, row in rows],
        part,
        stack_states([tuple(x[row] for x in _present(evaluation.state)) for evaluation, row in rows]),
        [
            Edges(
                move,
                picks[0][1].sigma_next,
                torch.tensor([new for new, _, _ in picks]),
                torch.stack([edges.nodes[e] for _, edges, e in picks]),
                stack_states([tuple(x[e] for x in _present(edges.next_state)) for _, edges, e in picks]),
                torch.stack([_present(edges.log_prob)[e] for _, edges, e in picks]),
                stack_states([tuple(x[e] for x in _present(edges.mean)) for _, edges, e in picks])
                if picks[0][1].mean
                else None,
            )
            for move, picks in taken.items()
        ],
    )


def _present(value: T | None) -> T:
    assert value is not None  # trained edges and their evaluations have all fields
    return value
