"""What processes tell each other: sums and lists over all of them, or over the shares of the data that they work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from flowgrpo.training.lockstep import Lockstep
from flowgrpo.training.share import Share


@dataclass(frozen=True)
class Exchange:
    """Sums and lists of what processes have; all of them must ask for each together.

    Attributes:
        share: of the data, which this process works on. Of several processes that work on one, the first speaks for it.
        lockstep: in which they call networks in shards, and which they leave to meet.
    """

    accelerator: Accelerator
    share: Share
    lockstep: Lockstep

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all processes."""
        if self.accelerator.num_processes == 1:
            return tensor
        self.lockstep.join()
        return self.accelerator.reduce(tensor.to(self.accelerator.device), "sum")

    def sum_shares(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the shares of the data."""
        return self.sum(tensor if self.share.leads else torch.zeros_like(tensor))

    def gather(self, objects: list[Any]) -> list[Any]:
        """The objects of all processes, in their order."""
        self.lockstep.join()
        return gather_object(objects)

    def gather_shares(self, objects: list[Any]) -> list[Any]:
        """The objects of all shares of the data, in their order."""
        return self.gather(objects if self.share.leads else [])

    def totals(self, counts: dict[str, int]) -> dict[str, int]:
        """Sums of counts over the shares of the data, which all have the same names."""
        if not counts:
            return {}
        sums = self.sum_shares(torch.tensor(list(counts.values()), dtype=torch.float64)).tolist()
        return {name: int(total) for name, total in zip(counts, sums, strict=True)}
