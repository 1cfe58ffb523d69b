"""Parts of trees that leave the update.

`prune` drops trained edges and regroups the remaining ones into full micro-batches. `replace_roots` drops the trees of
some roots and adds others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TypeVar, overload

import torch

from samplers.batches import batched
from samplers.kernels import State
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


def replace_roots(tree: Tree, other: Tree) -> Tree:
    """Return the tree with the trees of `other` added, in place of those of the same roots (group and index).

    The nodes of a dropped root stay in `Tree.nodes`, so that indices stay valid, but no leaf and no evaluation has
    them. The nodes of `other` follow. Evaluations are ordered by sigma, from noise to data. An evaluation that loses
    rows has fewer rows than in the rollout, so their ratio is 1 only up to rounding. Neither tree has graphs.
    """
    dropped = {(node.root.group, node.root.index) for node in other.nodes}
    kept = torch.tensor([(node.root.group, node.root.index) not in dropped for node in tree.nodes])
    first = len(tree.nodes)
    nodes = [node if node.parent is None else replace(node, parent=node.parent + first) for node in other.nodes]
    left = [_keep_rows(evaluation, kept) for evaluation in tree.evaluations]
    evaluations = [evaluation for evaluation in left if evaluation.edges]
    for evaluation in other.evaluations:
        evaluations.append(
            replace(evaluation, edges=[replace(edges, nodes=edges.nodes + first) for edges in evaluation.edges])
        )
    leaves = kept[tree.leaves]
    samples = zip(_rows_of(tree.samples, leaves), other.samples, strict=True)
    return Tree(
        tree.sigmas,
        [*tree.nodes, *nodes],
        sorted(evaluations, key=lambda evaluation: -evaluation.sigma),
        [leaf for leaf in tree.leaves if kept[leaf]] + [leaf + first for leaf in other.leaves],
        tuple(torch.cat(column) for column in samples),
        {i: state for i, state in tree.shared.items() if kept[i]}
        | {i + first: state for i, state in other.shared.items()},
    )


def _keep_rows(evaluation: Evaluation, kept: torch.Tensor) -> Evaluation:
    """Return the evaluation without the rows whose edges lead to nodes that are False in `kept` (nodes,)."""
    masks = [kept[edges.nodes] for edges in evaluation.edges]
    if all(mask.all() for mask in masks):
        return evaluation
    rows = torch.cat([edges.rows[mask] for edges, mask in zip(evaluation.edges, masks, strict=True)]).unique()
    place = torch.full((len(evaluation.rows),), -1)
    place[rows] = torch.arange(len(rows))
    edges_left = [
        replace(
            edges,
            rows=place[edges.rows[mask]],
            nodes=edges.nodes[mask],
            next_state=_rows_of(edges.next_state, mask),
            log_prob=None if edges.log_prob is None else edges.log_prob[mask.to(edges.log_prob.device)],
            mean=_rows_of(edges.mean, mask),
        )
        for edges, mask in zip(evaluation.edges, masks, strict=True)
        if mask.any()
    ]
    own = [evaluation.rows[row] for row in rows.tolist()]
    return replace(evaluation, rows=own, state=_rows_of(evaluation.state, rows), edges=edges_left)


@overload
def _rows_of(state: State, rows: torch.Tensor) -> State: ...
@overload
def _rows_of(state: None, rows: torch.Tensor) -> None: ...
def _rows_of(state: State | None, rows: torch.Tensor) -> State | None:
    return None if state is None else tuple(x[rows.to(x.device)] for x in state)
