"""Data shards: which samples of an iteration, and which held-out prompts, a process works on."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from accelerate import Accelerator
from torch import distributed

from flowgrpo.training.distributed.worker_roles import Roles


@dataclass(frozen=True)
class DataShard:
    """Data shard number `index` of `count`; by default all data on one process.

    With `run.context_parallel`, several processes have the same rows, noise and rewards. They split each call of the
    network, and each has a part of the gradient. Only the first of them contributes to counts and gathers.
    """

    index: int = 0
    count: int = 1
    _: KW_ONLY
    together: int = 1  # processes per shard, of consecutive ranks
    leads: bool = True  # whether this is the first process of the shard, which scores its samples
    group: distributed.ProcessGroup | None = None  # gloo group of the shard's processes, if there are several

    def broadcast(self, value: Any) -> Any:
        """Return the value that the shard's first process gives; a collective call of the shard's processes."""
        if self.group is None:
            return value
        box = [value]
        distributed.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def first_of(self, index: int) -> int:
        """Return the rank of a shard's first process."""
        return index * self.together


WHOLE = DataShard()


def data_shards(accelerator: Accelerator, together: int, roles: Roles) -> list[DataShard]:
    """Return the data shards that this process trains on, generates for or evaluates; all processes call this together.

    Each shard has `together` processes, but only one if the run has generators or evaluators.
    """
    index, processes = accelerator.process_index, roles.trainers
    if roles.generates(index):
        return [DataShard(trainer, processes) for trainer in roles.ever_served(index)]
    if roles.evaluates(index):
        return [DataShard(index - roles.ranks_of_evaluators.start, roles.evaluators)]
    if together == 1:
        return [DataShard(index, processes)]
    group, _ = distributed.new_subgroups(together, backend="gloo")  # a reward may outlast NCCL's timeout
    place = index // together, processes // together
    return [DataShard(*place, together=together, leads=index % together == 0, group=group)]
