"""Layout of processes: how many run on each machine, and how many share sharded networks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from flowgrpo.schema.sections import RunConfig

OF_NODE = 8  # default GPUs per machine


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes with one GPU each, `of_node` of them on each machine; `sharding` is the value of `run.sharding`."""

    processes: int
    of_node: int = OF_NODE
    sharding: str = "none"

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.processes // self.of_node)

    @property
    def among(self) -> int:
        """Number of processes that share one copy of the networks; 1 without sharding."""
        return {"none": 1, "fsdp2": self.processes, "hsdp": min(self.processes, self.of_node)}[self.sharding]

    @property
    def replicas(self) -> int:
        """Number of processes that hold the same shard."""
        return self.processes // self.among


def of_machine(processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many of `processes`, launched together, run on this machine."""
    return int(environment.get("LOCAL_WORLD_SIZE", processes))


def detect_layout(config: RunConfig, of_node: int = OF_NODE) -> Layout:
    """Return the layout of a run on machines of `of_node` GPUs."""
    return Layout(processes=config.run.processes, of_node=of_node, sharding=config.run.sharding)
