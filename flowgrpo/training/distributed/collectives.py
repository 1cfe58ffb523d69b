"""Collectives: sums and gathers over all processes of a role, or over one process of each data shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed

from flowgrpo.training.distributed.data_shard import DataShard
from flowgrpo.training.distributed.fsdp_lockstep import Lockstep
from flowgrpo.training.distributed.worker_roles import Roles

# Timeout for a link that hangs. It is long, since ranks may wait for slow rewards. A rank that dies is noticed at once.
LONGEST = timedelta(hours=6)


@dataclass(frozen=True)
class Collectives:
    """Collectives over all trainers, or over all evaluators."""

    accelerator: Accelerator
    shard: DataShard  # only its first process contributes to sums and gathers over shards
    lockstep: Lockstep  # `join` is called before each collective
    _: KW_ONLY
    count: int  # number of participating processes
    group: distributed.ProcessGroup | None = None  # None for all processes

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes."""
        return tensor if self.count == 1 else self._sum(tensor)

    @property
    def sum_gradients(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that sums a gradient over all processes; None if there is only one process."""
        return None if self.count == 1 else self._sum

    def sum_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the data shards."""
        return self.sum(tensor if self.shard.leads else torch.zeros_like(tensor))

    def gather(self, objects: list[Any]) -> list[Any]:
        """Concatenate the lists of all processes, in the order of ranks."""
        return self._gather(objects)

    def gather_shards(self, objects: list[Any]) -> list[Any]:
        """Concatenate the lists of all data shards, in the order of their indices."""
        return self.gather(objects if self.shard.leads else [])

    def totals(self, counts: dict[str, int]) -> dict[str, int]:
        """Return the sum of each count over the data shards. All processes must give the same names."""
        if not counts:
            return {}
        sums = self.sum_shards(torch.tensor(list(counts.values()), dtype=torch.float64)).tolist()
        return {name: int(total) for name, total in zip(counts, sums, strict=True)}

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.lockstep.join()
        total = tensor.to(self.accelerator.device, copy=True)
        distributed.all_reduce(total, group=self.group)
        return total

    def _gather(self, objects: list[Any]) -> list[Any]:
        self.lockstep.join()
        if self.group is None:
            return gather_object(objects)
        lists: list[list[Any]] = [[]] * self.count
        distributed.all_gather_object(lists, objects, group=self.group)
        return [each for own in lists for each in own]


def build_collectives(accelerator: Accelerator, shard: DataShard, lockstep: Lockstep, roles: Roles) -> Collectives:
    """Build the collectives of this process's role; a collective call of all processes."""
    if roles.trainers == accelerator.num_processes:
        return Collectives(accelerator, shard, lockstep, count=roles.trainers)
    trainers = distributed.new_group(range(roles.trainers), timeout=LONGEST)
    evaluators = distributed.new_group(roles.ranks_of_evaluators, timeout=LONGEST) if roles.evaluators else None
    evaluates = roles.evaluates(accelerator.process_index)
    count, group = (roles.evaluators, evaluators) if evaluates else (roles.trainers, trainers)
    own_group = cast("distributed.ProcessGroup | None", group)  # new_group returns an int to non-members only
    return Collectives(accelerator, shard, lockstep, count=count, group=own_group)
