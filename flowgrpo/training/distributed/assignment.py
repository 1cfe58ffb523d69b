"""Which samples of an iteration each process makes: roots are dealt, so that a group may lie on several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.advantages.prompt_groups import Groups
from flowgrpo.training.distributed import minibatches
from flowgrpo.training.distributed.data_share import DataShard
from flowgrpo.training.distributed.minibatches import Member


@dataclass(frozen=True)
class Assignment:
    """Which samples each process makes.

    Attributes:
        hands: of each process, in their order; processes that work on one share of the data are one here.
        process: this one.
    """

    hands: Sequence[Sequence[Member]]
    process: int

    @property
    def own(self) -> Sequence[Member]:
        """This process's samples."""
        return self.hands[self.process]

    @cached_property
    def divided(self) -> dict[int, list[int]]:
        """The groups of which several processes have samples, in their order, and these processes."""
        holders: dict[int, dict[int, None]] = defaultdict(dict)
        for process, hand in enumerate(self.hands):
            for group, _ in hand:
                holders[group][process] = None
        return {group: list(found) for group, found in sorted(holders.items()) if len(found) > 1}


def parts_of(config: RunConfig, groups: Groups, iteration: int) -> list[list[int]]:
    """The optimizer step that each root of each group of an iteration belongs to; see `minibatches.of_roots`."""
    roots = config.algorithm.roots(config.train.group_size)
    return minibatches.of_roots(config.train, roots, groups.roots, seed=config.run.seed, iteration=iteration)


def assign_roots(config: RunConfig, groups: Groups, *, iteration: int, share: DataShard) -> Assignment:
    """The roots of an iteration that a process, or the processes of one share, grow; see `minibatches.of_processes`."""
    of_roots = parts_of(config, groups, iteration)
    hands = minibatches.of_processes(
        config.train, config.algorithm, of_roots, share.count, generators=config.run.generators
    )
    return Assignment(hands, share.index)


def pool_of(config: RunConfig, groups: Groups, *, iteration: int, share: DataShard) -> Assignment:
    """The starts that a process samples for the draft of an iteration (`train.draft`); none without one.

    Where generators make the samples, each drafts for its own groups, for it never meets the others.
    """
    draft = config.train.draft if config.kind == "flow" else None
    sizes = [0 if draft is None else draft.pool * roots for roots in groups.roots]
    if config.run.generators:
        own = (
            dict.fromkeys(group for group, _ in hand)
            for hand in assign_roots(config, groups, iteration=iteration, share=share).hands
        )
        return Assignment(
            [[(group, start) for group in hand for start in range(sizes[group])] for hand in own], share.index
        )
    every = [(group, start) for group, size in enumerate(sizes) for start in range(size)]
    return Assignment(minibatches.evenly(every, share.count), share.index)
