"""What processes tell each other: sums and lists over all of them, or over the shares of the data that they work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed

from flowgrpo.training.distributed.data_share import DataShard
from flowgrpo.training.distributed.fsdp_lockstep import Lockstep
from flowgrpo.training.distributed.worker_roles import Roles

# How long a process waits where all meet. Others may be asking slow rewards, or roll out again in smaller calls; one that
# ends is noticed at once, by whoever started them, and this is for a link that hangs.
LONGEST = timedelta(hours=6)


@dataclass(frozen=True)
class Collectives:
    """Sums and lists of what processes have; all of them must ask for each together.

    Attributes:
        count: of the processes that take part: of those that train, or of those that evaluate.
        share: of the data, which this process works on. Of several processes that work on one, the first speaks for it.
        lockstep: in which they call networks in shards, and which they leave to meet.
    """

    accelerator: Accelerator
    share: DataShard
    lockstep: Lockstep
    _: KW_ONLY
    count: int
    group: distributed.ProcessGroup | None = None  # of those that take part, where there are others

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all processes."""
        return tensor if self.count == 1 else self._sum(tensor)

    @property
    def sum_gradients(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The sum over all processes of gradients, whose step is never made again; None where there is one process."""
        return None if self.count == 1 else self._sum

    def sum_shares(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the shares of the data."""
        return self.sum(tensor if self.share.leads else torch.zeros_like(tensor))

    def gather(self, objects: list[Any]) -> list[Any]:
        """The objects of all processes, in their order."""
        return self._gathered(objects)

    def gather_shares(self, objects: list[Any]) -> list[Any]:
        """The objects of all shares of the data, in their order."""
        return self.gather(objects if self.share.leads else [])

    def totals(self, counts: dict[str, int]) -> dict[str, int]:
        """Sums of counts over the shares of the data, which all have the same names."""
        if not counts:
            return {}
        sums = self.sum_shares(torch.tensor(list(counts.values()), dtype=torch.float64)).tolist()
        return {name: int(total) for name, total in zip(counts, sums, strict=True)}

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.lockstep.join()
        total = tensor.to(self.accelerator.device, copy=True)
        distributed.all_reduce(total, group=self.group)
        return total

    def _gathered(self, objects: list[Any]) -> list[Any]:
        self.lockstep.join()
        if self.group is None:
            return gather_object(objects)
        everyone: list[Any] = [None] * self.count
        distributed.all_gather_object(everyone, objects, group=self.group)
        return [each for own in everyone for each in own]


def collectives_of(accelerator: Accelerator, share: DataShard, lockstep: Lockstep, roles: Roles) -> Collectives:
    """What this process tells those of its role; all processes must ask for theirs together."""
    if roles.trainers == accelerator.num_processes:
        return Collectives(accelerator, share, lockstep, count=roles.trainers)
    trainers = distributed.new_group(range(roles.trainers), timeout=LONGEST)
    evaluators = distributed.new_group(roles.ranks_of_evaluators, timeout=LONGEST) if roles.evaluators else None
    evaluates = roles.evaluates(accelerator.process_index)
    count, group = (roles.evaluators, evaluators) if evaluates else (roles.trainers, trainers)
    own = cast("distributed.ProcessGroup | None", group)  # a number only where this process is no member
    return Collectives(accelerator, share, lockstep, count=count, group=own)
