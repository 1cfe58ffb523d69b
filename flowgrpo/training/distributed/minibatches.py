"""Which optimizer step of an iteration trains on what, by `train.split`, and which process makes which samples.

The parts are the same on any number of processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.schema.sections import Train
    from samplers import noise
    from samplers.trees import Tree
else:
    noise = lazy("samplers.noise")

T = TypeVar("T")
Member = tuple[int, int]  # a sample, or the root of a tree: its group, and its index there
MOST_SAMPLES = 1 << 20  # of an iteration, each of which has a place in lists


def kept_whole(train: Train, algorithm: Any, generators: int = 0) -> str | None:
    """The setting for which a group must lie on one process, as it is written; None where its roots may be shared out."""
    if train.split == "edges":
        return "train.split=edges"
    return f"run.generators={generators}" if generators else algorithm.keeps_groups_whole


def check_geometry(train: Train, algorithm: Any, processes: int, *, sharing: int = 1, generators: int = 0) -> None:
    """Samples must not be too many, and every process must have as many roots, or whole groups, of each part.

    Args:
        algorithm: of either kind.
        processes: that train.
        sharing: how many processes have the same roots, as `run.context_parallel` says.
        generators: further processes, that make the samples of these.

    Raises:
        InputError: they do not divide, and it names the nearest numbers that do; or they are too many.
    """
    if processes % sharing:
        most = processes // sharing * sharing
        choices = " or ".join(str(n) for n in (most, most + sharing) if n)
        raise InputError(
            f"run.context_parallel: {processes} {'process does' if processes == 1 else 'processes do'} not divide into "
            f"groups of {sharing}, take run.processes={choices}"
        )
    roots, whole = algorithm.roots(train.group_size), kept_whole(train, algorithm, generators)
    if train.groups * train.group_size > MOST_SAMPLES:
        raise InputError(
            f"train.groups: {train.groups} groups of train.group_size = {train.group_size} samples are more than "
            f"{MOST_SAMPLES} in an iteration, take less"
        )
    together, shares = _together(train, roots), processes // sharing
    among = f"{processes} processes" if sharing == 1 else f"{processes} processes of which each {sharing} work together"
    least = 1 if whole else together * roots // train.updates  # of a part
    unit = together * (shares // math.gcd(shares, least))
    if train.groups % unit == 0:
        return
    below = train.groups // unit * unit
    choices = " or ".join(str(n) for n in (below, below + unit) if n)
    what = f"{train.groups} groups"
    if train.split == "samples" or (shares > 1 and not whole):
        what += f" of {roots} {'sample' if roots == train.group_size else 'start'}{'s' * (roots > 1)}"
    if whole and shares > 1:
        what += f", whole because of {whole},"
    into = f"into train.updates = {train.updates} parts on {among}"
    if train.split == "edges":
        into = f"among {among}"
    raise InputError(f"train.groups: {what} do not divide {into}, take {choices}")


def _together(train: Train, roots: int) -> int:
    """Return the least number of groups whose roots divide into parts of equal size."""
    return {"groups": train.updates, "samples": train.updates // math.gcd(train.updates, roots), "edges": 1}[
        train.split
    ]


def of_roots(train: Train, roots: int, sizes: Sequence[int], *, seed: int, iteration: int) -> list[list[int]]:
    """The part of every root of every group of an iteration; 0 where edges are dealt, for then roots are not.

    `groups` are cut into runs; `samples` are shuffled, as few groups at a time as give parts of equal size: one where a
    group's roots divide, so that each part has as many of every group. Of several, they lie as far apart as can be.

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
    apart = len(sizes) // _together(train, roots)
    for first in range(apart):
        deck = [(group, index) for group in range(first, len(sizes), apart) for index in range(sizes[group])]
        order = noise.generator(seed, "parts", iteration, first).permutation(len(deck)).tolist()
        for turn, card in enumerate(order):
            group, index = deck[card]
            parts[group][index] = turn * train.updates // len(deck)
    return parts


def of_processes(
    train: Train, algorithm: Any, parts: Sequence[Sequence[int]], processes: int, *, generators: int = 0
) -> list[list[Member]]:
    """The roots of an iteration that each process grows, in their order: as many of each part, and few groups divided.

    Where sizes are unequal (`prompts.pick.budget: knapsack`) one process has a root of a part more than another.

    Args:
        algorithm: of either kind.
        parts: of every root of every group, see `of_roots`.
    """
    whole, together = kept_whole(train, algorithm, generators), _together(train, algorithm.roots(train.group_size))
    apart = len(parts) // together if train.split == "samples" else len(parts)
    in_order = sorted(range(len(parts)), key=lambda group: (group % apart, group))  # those that were shuffled together
    piles: dict[int, list[list[Member]]] = defaultdict(list)
    for group in in_order:
        own = [(group, index) for index in range(len(parts[group]))]
        if whole:
            piles[parts[group][0] if train.split == "groups" else 0].append(own)
            continue
        for member in own:
            piles[parts[group][member[1]]].append([member])
    hands: list[list[Member]] = [[] for _ in range(processes)]
    for pile in piles.values():
        for process, hand in enumerate(evenly(pile, processes)):
            hands[process] += [member for members in hand for member in members]
    return [sorted(hand) for hand in hands]


def evenly(things: Sequence[T], processes: int) -> list[Sequence[T]]:
    """Things cut into runs for each process, of which none is longer than another by more than one."""
    ends = [len(things) * process // processes for process in range(processes + 1)]
    return [things[first:end] for first, end in pairwise(ends)]


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
