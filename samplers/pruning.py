"""Trees with some edges removed from the update, and the others gathered into full calls of the model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TypeVar

import torch

from samplers.batches import batched
from samplers.trees import Edges, Evaluation, Move, Tree, stacked

T = TypeVar("T")


def pruned(tree: Tree, keep: torch.Tensor, micro_batch: int, parts: torch.Tensor | None = None) -> Tree:
    """Return the tree with only the trained edges in `keep` (nodes,), gathered into full evaluations.

    Rows meet others than in the rollout, so their ratio is 1 up to rounding only. `parts` (nodes,) is the part of the edge
    to each node, equal for edges that leave one state; by default that of its root.
    """
    left: dict[tuple[int, float], list[tuple[Evaluation, int]]] = defaultdict(list)
    for evaluation in tree.evaluations:
        part_of = {
            row: evaluation.part if parts is None else int(parts[node])
            for edges in evaluation.trained
            for row, node in zip(edges.rows.tolist(), edges.nodes.tolist(), strict=True)
            if keep[node]
        }
        for row, part in sorted(part_of.items()):
            left[part, evaluation.sigma].append((evaluation, row))
    evaluations = [
        _gather(batch, part, keep) for (part, _), rows in left.items() for batch in batched(rows, micro_batch)
    ]
    return replace(tree, evaluations=evaluations)


def _gather(rows: list[tuple[Evaluation, int]], part: int, keep: torch.Tensor) -> Evaluation:
    """Return one evaluation of rows of several, with their trained edges in `keep`."""
    taken: dict[Move, list[tuple[int, Edges, int]]] = defaultdict(list)  # move -> (new row, edges, index in them)
    for new, (evaluation, row) in enumerate(rows):
        for edges in evaluation.trained:
            for index in ((edges.rows == row) & keep[edges.nodes]).nonzero().flatten().tolist():
                taken[edges.move].append((new, edges, index))
    return Evaluation(
        rows[0][0].sigma,
        [evaluation.rows[row] for evaluation, row in rows],
        part,
        stacked([tuple(x[row] for x in _present(evaluation.state)) for evaluation, row in rows]),
        [
            Edges(
                move,
                picks[0][1].sigma_next,
                torch.tensor([new for new, _, _ in picks]),
                torch.stack([edges.nodes[e] for _, edges, e in picks]),
                stacked([tuple(x[e] for x in _present(edges.next_state)) for _, edges, e in picks]),
                torch.stack([_present(edges.log_prob)[e] for _, edges, e in picks]),
                stacked([tuple(x[e] for x in _present(edges.mean)) for _, edges, e in picks])
                if picks[0][1].mean
                else None,
            )
            for move, picks in taken.items()
        ],
    )


def _present(value: T | None) -> T:
    assert value is not None  # in trained edges and their evaluations
    return value
