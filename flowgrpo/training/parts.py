"""Which optimizer step of an iteration trains on what, by `train.split`; the same on any number of processes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowgrpo.errors import InputError
from flowgrpo.schema.heavy import torch
from flowgrpo.schema.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.schema.sections import Train
    from samplers import noise
    from samplers.trees import Tree
else:
    noise = lazy("samplers.noise")

MOST_SAMPLES = 1 << 20  # of an iteration, each of which has a place in lists


def check_geometry(train: Train, roots: int, processes: int) -> None:
    """Samples must not be too many; every process must have as many groups, and as many groups or roots of each part.

    Args:
        roots: of a group.

    Raises:
        InputError: they do not divide, and it names the nearest numbers that do; or they are too many.
    """
    if train.groups * train.group_size > MOST_SAMPLES:
        raise InputError(
            f"train.groups: {train.groups} groups of train.group_size = {train.group_size} samples are more than "
            f"{MOST_SAMPLES} in an iteration, take less"
        )
    unit = _together(train, roots) * processes
    if train.groups % unit == 0:
        return
    below = train.groups // unit * unit
    choices = " or ".join(str(n) for n in (below, below + unit) if n)
    what = f"{train.groups} groups"
    if train.split == "samples":
        what += f" of {roots} {'sample' if roots == 1 else 'samples'}"
    into = f"into train.updates = {train.updates} parts on {processes} processes"
    if train.split == "edges":
        into = f"among {processes} processes"
    raise InputError(f"train.groups: {what} do not divide {into}, take {choices}")


def _together(train: Train, roots: int) -> int:
    """Return the least number of groups whose roots divide into parts of equal size."""
    return {"groups": train.updates, "samples": train.updates // math.gcd(train.updates, roots), "edges": 1}[
        train.split
    ]


def of_roots(train: Train, roots: int, sizes: Sequence[int], *, seed: int, iteration: int) -> list[list[int]]:
    """The part of every root of every group of an iteration; 0 where edges are dealt, for then roots are not.

    `groups` are cut into runs; `samples` are shuffled, as few groups at a time as give parts of equal size: one where a
    group's roots divide, so that each part has as many of every group.

    Args:
        roots: of a group, where all are alike.
        sizes: (G,) roots of each group, on all processes.
        seed: of the run.
    """
    if train.split == "edges":
        return [[0] * size for size in sizes]
    if train.split == "groups":
        return [[group * train.updates // len(sizes)] * size for group, size in enumerate(sizes)]
    parts = [[0] * size for size in sizes]
    apart = len(sizes) // _together(train, roots)  # groups so far apart are one process's, on any number of processes
    for first in range(apart):
        deck = [(group, index) for group in range(first, len(sizes), apart) for index in range(sizes[group])]
        order = noise.generator(seed, "parts", iteration, first).permutation(len(deck)).tolist()
        for turn, card in enumerate(order):
            group, index = deck[card]
            parts[group][index] = turn * train.updates // len(deck)
    return parts


def of_edges(tree: Tree, keep: torch.Tensor, *, updates: int, seed: int, iteration: int) -> torch.Tensor:
    """The part (nodes,) int64 of the edge to each node: those of a group are shuffled and dealt, one more to some parts.

    The edges that leave one state stay together, for they share its evaluation. BranchGRPO's released code has an optimizer
    step for each 12 of the shuffled edges of a process's trees.

    Args:
        keep: (nodes,) whether the edge to each node is trained on.
        seed: of the run.
    """
    leaving = defaultdict(list)  # state -> trained edges
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            for node in edges.nodes[keep[edges.nodes]].tolist():
                leaving[tree.nodes[node].parent].append(node)
    groups = defaultdict(list)
    for state in sorted(leaving, key=lambda i: (tree.nodes[i].path, tree.nodes[i].step)):
        groups[tree.nodes[state].root.group].append(state)
    parts = torch.zeros(len(tree.nodes), dtype=torch.long)
    for group, states in groups.items():
        random = noise.generator(seed, "parts", iteration, group)
        order, turns = random.permutation(len(states)).tolist(), random.permutation(updates).tolist()
        for turn, index in enumerate(order):
            parts[leaving[states[index]]] = turns[turn % updates]
    return parts
