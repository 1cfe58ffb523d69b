"""The share of a run's data that a process works on: groups of an iteration, and held-out prompts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from accelerate import Accelerator
from torch import distributed

from flowgrpo.training.distributed.worker_roles import Roles


@dataclass(frozen=True)
class DataShard:
    """One of the shares into which the data of a run are dealt; by default all of them, to one process.

    Several processes may work on one share, with the same rows, noise and rewards: they share each call of the network
    (`run.context_parallel`), and each has a part of the gradient. What is counted or gathered comes from the first of them.

    Attributes:
        index: of the share, from 0.
        count: how many shares there are.
        together: how many processes work on each, neighbours by their number.
        leads: whether this is the first process that works on it, which scores its samples.
        group: the processes that work on it, which talk on the host; None where it is one.
    """

    index: int = 0
    count: int = 1
    _: KW_ONLY
    together: int = 1
    leads: bool = True
    group: distributed.ProcessGroup | None = None

    def told(self, value: Any) -> Any:
        """The value of the first process that works on this share, on each of them; all must ask for it together."""
        if self.group is None:
            return value
        box = [value]
        distributed.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def first_of(self, index: int) -> int:
        """The number of the first process that works on a share."""
        return index * self.together


WHOLE = DataShard()


def data_shards(accelerator: Accelerator, together: int, roles: Roles) -> list[DataShard]:
    """The share of this process, or those that it generates for; all processes must ask for theirs together.

    That of an evaluator is of the held-out prompts alone.

    Args:
        together: how many processes, neighbours by their number, work on one share; it divides their number, and is 1 where
            some do not train.
    """
    index, processes = accelerator.process_index, roles.trainers
    if roles.generates(index):
        return [DataShard(hand, processes) for hand in roles.every_hand(index)]
    if roles.evaluates(index):
        return [DataShard(index - roles.ranks_of_evaluators.start, roles.evaluators)]
    if together == 1:
        return [DataShard(index, processes)]
    group, _ = distributed.new_subgroups(together, backend="gloo")  # a reward may take longer than a GPU's group waits
    place = index // together, processes // together
    return [DataShard(*place, together=together, leads=index % together == 0, group=group)]
