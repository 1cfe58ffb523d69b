"""Assignment of an iteration's samples to processes, root by root, so that several processes may share a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed import minibatches
from flowgrpo.training.distributed.data_shard import DataShard
from flowgrpo.training.distributed.minibatches import Member
from flowgrpo.training.prompts.prompt_groups import Groups


@dataclass(frozen=True)
class Assignment:
    """The samples that each process makes."""

    hands: Sequence[Sequence[Member]]  # samples, or roots of trees; the processes of a data shard count as one
    process: int  # index of this process in `hands`

    @property
    def own(self) -> Sequence[Member]:
        """This process's samples."""
        return self.hands[self.process]

    @cached_property
    def divided(self) -> dict[int, list[int]]:
        """The groups that several processes share, in ascending order, each with the indices of these processes."""
        holders: dict[int, dict[int, None]] = defaultdict(dict)
        for process, hand in enumerate(self.hands):
            for group, _ in hand:
                holders[group][process] = None
        return {group: list(processes) for group, processes in sorted(holders.items()) if len(processes) > 1}


def assign_minibatches(config: RunConfig, groups: Groups, iteration: int) -> list[list[int]]:
    """Return the optimizer step of each root of each group; see `minibatches.of_roots`."""
    roots = config.algorithm.roots(config.train.group_size)
    return minibatches.of_roots(config.train, roots, groups.roots, seed=config.run.seed, iteration=iteration)


def assign_roots(config: RunConfig, groups: Groups, *, iteration: int, shard: DataShard) -> Assignment:
    """Assign the roots of an iteration to data shards; see `minibatches.of_processes`."""
    of_roots = assign_minibatches(config, groups, iteration)
    hands = minibatches.of_processes(
        config.train, config.algorithm, of_roots, shard.count, generators=config.run.generators
    )
    return Assignment(hands, shard.index)


def assign_pool(config: RunConfig, groups: Groups, *, iteration: int, shard: DataShard) -> Assignment:
    """Assign the draft samples of an iteration (`train.draft`); generators draft for their own groups only."""
    draft = config.train.draft if config.kind == "flow" else None
    sizes = [0 if draft is None else draft.pool * roots for roots in groups.roots]
    if config.run.generators:
        hands = assign_roots(config, groups, iteration=iteration, shard=shard).hands
        own_groups = (dict.fromkeys(group for group, _ in hand) for hand in hands)
        drafts = [[(group, start) for group in own for start in range(sizes[group])] for own in own_groups]
        return Assignment(drafts, shard.index)
    every = [(group, start) for group, size in enumerate(sizes) for start in range(size)]
    return Assignment(minibatches.evenly(every, shard.count), shard.index)
