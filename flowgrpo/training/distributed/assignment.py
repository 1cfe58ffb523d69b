"""Assignment of an iteration's samples to processes, root by root, so that several processes may share a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from flowgrpo.schema.sections import RunConfig, Train
from flowgrpo.training.distributed import minibatches
from flowgrpo.training.distributed.data_shard import DataShard
from flowgrpo.training.prompts.prompt_groups import Groups

T = TypeVar("T")
Member = tuple[int, int]  # a sample or the root of a tree: its group, and its index there


@dataclass(frozen=True)
class Assignment:
    """The samples, or the roots of trees, that each process generates."""

    by_process: Sequence[Sequence[Member]]  # samples, or roots of trees; the processes of a data shard count as one
    process: int  # index of this process in `by_process`

    @property
    def own(self) -> Sequence[Member]:
        """The samples, or the roots of trees, that this process generates."""
        return self.by_process[self.process]

    @cached_property
    def divided(self) -> dict[int, list[int]]:
        """The groups that several processes share, in ascending order, each with the indices of these processes."""
        holders: dict[int, dict[int, None]] = defaultdict(dict)
        for process, members in enumerate(self.by_process):
            for group, _ in members:
                holders[group][process] = None
        return {group: list(processes) for group, processes in sorted(holders.items()) if len(processes) > 1}


def assign_minibatches(config: RunConfig, groups: Groups, iteration: int) -> list[list[int]]:
    """Return the optimizer step of each root of each group; see `minibatches.of_roots`. Each stage is divided by itself."""
    first = groups.first or groups.roots
    further = [size - before for size, before in zip(groups.roots, first, strict=True)]
    usual = config.algorithm.roots(config.train.group_size)
    stages = [
        minibatches.of_roots(config.train, usual, sizes, seed=config.run.seed, iteration=iteration)
        for sizes in (first, further)
    ]
    return [[*parts, *later] for parts, later in zip(*stages, strict=True)]


def assign_roots(config: RunConfig, groups: Groups, *, iteration: int, shard: DataShard) -> Assignment:
    """Assign the roots of an iteration, or of its second stage, to data shards; see `assign_members`."""
    of_roots = assign_minibatches(config, groups, iteration)
    by_process = assign_members(
        config.train,
        config.algorithm,
        of_roots,
        shard.count,
        generators=config.run.generators,
        first=groups.first,
    )
    return Assignment(by_process, shard.index)


def assign_pool(config: RunConfig, groups: Groups, *, iteration: int, shard: DataShard) -> Assignment:
    """Assign the draft samples of an iteration (`train.draft`); generators draft for their own groups only."""
    draft = config.train.draft if config.kind == "flow" else None
    sizes = [0 if draft is None else draft.pool * roots for roots in groups.roots]
    if config.run.generators:
        by_process = assign_roots(config, groups, iteration=iteration, shard=shard).by_process
        own_groups = (dict.fromkeys(group for group, _ in members) for members in by_process)
        drafts = [[(group, start) for group in own for start in range(sizes[group])] for own in own_groups]
        return Assignment(drafts, shard.index)
    every = [(group, start) for group, size in enumerate(sizes) for start in range(size)]
    return Assignment(_evenly(every, shard.count), shard.index)


def assign_members(
    train: Train,
    algorithm: Any,
    parts: Sequence[Sequence[int]],
    processes: int,
    *,
    generators: int = 0,
    first: Sequence[int] | None = None,
) -> list[list[Member]]:
    """Return the sorted roots of each process. `parts` has the minibatch of each root, see `minibatches.of_roots`.

    With `first` (G,) they are the roots of each group from this index on. Groups that must stay whole stay on the process
    that has their first roots.

    Processes get equal numbers of roots of each minibatch, and few groups are divided among processes. If group sizes
    differ (`prompts.pick`), the numbers of roots may differ by one.
    """
    whole, apart = minibatches.whole_groups_setting(train, algorithm, generators), len(parts)
    if train.split == "samples":
        apart //= minibatches.count_together(train, algorithm.roots(train.group_size))
    # Groups that were shuffled together become neighbours.
    in_order = sorted(range(len(parts)), key=lambda group: (group % apart, group))
    units: dict[int, list[list[Member]]] = defaultdict(list)  # part -> lists of roots that must stay on one process
    for group in in_order:
        members = [(group, index) for index in range(0 if first is None else first[group], len(parts[group]))]
        if whole:
            units[parts[group][0] if train.split == "groups" else 0].append(members)
            continue
        for member in members:
            units[parts[group][member[1]]].append([member])
    by_process: list[list[Member]] = [[] for _ in range(processes)]
    for of_part in units.values():
        for assigned, own in zip(by_process, _evenly(of_part, processes), strict=True):
            assigned += [member for members in own for member in members]
    return [sorted(assigned) for assigned in by_process]


def _evenly(things: Sequence[T], processes: int) -> list[Sequence[T]]:
    """Cut a sequence into one consecutive slice for each process; their lengths differ by at most one."""
    ends = [len(things) * process // processes for process in range(processes + 1)]
    return [things[first:end] for first, end in pairwise(ends)]
