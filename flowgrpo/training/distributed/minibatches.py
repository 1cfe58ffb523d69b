"""Minibatches: assignment of samples or edges to optimizer steps (`train.split`).

A part is the minibatch of one optimizer step. Parts do not depend on the number of processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.readable import counted

if TYPE_CHECKING:
    from flowgrpo.schema.sections import Train
    from samplers import noise
    from samplers.trees import Tree
else:
    noise = lazy("samplers.noise")

MOST_SAMPLES = 1 << 20  # in an iteration


def whole_groups_setting(train: Train, algorithm: Any, generators: int = 0) -> str | None:
    """Return the `key=value` that keeps each group on one process; None if processes may share groups."""
    if train.split == "edges":
        return "train.split=edges"
    return f"run.generators={generators}" if generators else algorithm.keeps_groups_whole


def check_geometry(train: Train, algorithm: Any, processes: int, *, sharing: int = 1, generators: int = 0) -> None:
    """Check that each minibatch divides into equal numbers of roots, or of whole groups, for all trainers.

    Raises InputError, with the nearest numbers of groups or of processes that divide; also for too many samples.

    Args:
        processes: number of trainers.
        sharing: number of processes that work on the same roots (`run.context_parallel`).
        generators: number of generators.
    """
    if processes % sharing:
        most = processes // sharing * sharing
        choices = " or ".join(str(n) for n in (most, most + sharing) if n)
        raise InputError(
            f"run.context_parallel: {processes} {'process does' if processes == 1 else 'processes do'} not divide into "
            f"groups of {sharing}, take run.processes={choices}"
        )
    roots, whole = algorithm.roots(train.group_size), whole_groups_setting(train, algorithm, generators)
    if train.groups * train.group_size > MOST_SAMPLES:
        raise InputError(
            f"train.groups: {train.groups} groups of train.group_size = {train.group_size} samples are more than "
            f"{MOST_SAMPLES} in an iteration, take less"
        )
    together, shards = count_together(train, roots), processes // sharing
    among = counted(processes, "process")
    among += f" of which each {sharing} work together" if sharing > 1 else ""
    least = 1 if whole else together * roots // train.updates  # of a part
    unit = together * (shards // math.gcd(shards, least))
    if train.groups % unit == 0:
        return
    below = train.groups // unit * unit
    choices = " or ".join(str(n) for n in (below, below + unit) if n)
    what = f"{train.groups} groups"
    if train.split == "samples" or (shards > 1 and not whole):
        what += f" of {roots} {'sample' if roots == train.group_size else 'start'}{'s' * (roots > 1)}"
    if whole and shards > 1:
        what += f", whole because of {whole},"
    into = f"into train.updates = {train.updates} parts on {among}"
    if train.split == "edges":
        into = f"among {among}"
    raise InputError(f"train.groups: {what} do not divide {into}, take {choices}")


def count_together(train: Train, roots: int) -> int:
    """Return the smallest number of groups whose roots divide into `train.updates` equal parts."""
    of_samples = train.updates // math.gcd(train.updates, roots)
    return {"groups": train.updates, "samples": of_samples, "edges": 1}[train.split]


def count_roots(group_size: int, by: int, what: str) -> int:
    """Return the number of roots of a group if each grows `by` samples; raise InputError if `by` does not divide it."""
    if group_size % by:
        below = group_size // by * by
        nearest = " or ".join(str(n) for n in (below, below + by) if n)
        raise InputError(f"train.group_size: {group_size} does not divide by the {by} {what}, take {nearest}")
    return group_size // by


def of_roots(train: Train, roots: int, sizes: Sequence[int], *, seed: int, iteration: int) -> list[list[int]]:
    """Return the part (the optimizer step, from 0) of every root of every group of an iteration.

    With `split: groups` the list of groups is cut into parts. With `split: samples`, roots are shuffled within the
    smallest sets of groups that give equal parts: one group if `train.updates` divides its number of roots, else groups
    at equal distances in the list. If the sizes of a set do not divide, chance decides which parts have one root more. With
    `split: edges` all parts are 0, since `of_edges` divides edges instead. `roots` is the usual number of roots in a group,
    `sizes` (G,) the number in each.
    """
    if train.split == "edges":
        return [[0] * size for size in sizes]
    if train.split == "groups":
        return [[group * train.updates // len(sizes)] * size for group, size in enumerate(sizes)]
    parts = [[0] * size for size in sizes]
    apart = len(sizes) // count_together(train, roots)
    for first in range(apart):
        deck = [(group, index) for group in range(first, len(sizes), apart) for index in range(sizes[group])]
        random = noise.generator(seed, "parts", iteration, first)
        order, turns = random.permutation(len(deck)).tolist(), list(range(train.updates))
        if len(deck) % train.updates:
            turns = random.permutation(turns).tolist()
        for turn, card in enumerate(order):
            group, index = deck[card]
            parts[group][index] = turns[turn * train.updates // len(deck)]
    return parts


def of_edges(tree: Tree, keep: torch.Tensor, *, updates: int, seed: int, iteration: int) -> torch.Tensor:
    """Return the optimizer step (nodes,) int64 that trains the edge to each node, given a mask `keep` of trained edges.

    The edges of a group are shuffled and spread over all steps. The edges out of one state stay together, because they
    share its evaluation. BranchGRPO's released code instead takes an optimizer step for every 12 of the shuffled edges
    of a process's trees.
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
