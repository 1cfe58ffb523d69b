"""How processes lie on machines, and how many of them share the networks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from flowgrpo.schema.sections import RunConfig

OF_NODE = 8  # GPUs of a machine, where nothing else is said


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes of one GPU each.

    Attributes:
        processes: all of them.
        of_node: on a machine.
        sharding: as `run.sharding`.
    """

    processes: int
    of_node: int = OF_NODE
    sharding: str = "none"

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.processes // self.of_node)

    @property
    def among(self) -> int:
        """How many share the networks, and what is learned where that is all of them; 1 where each holds the whole."""
        return {"none": 1, "fsdp2": self.processes, "hsdp": min(self.processes, self.of_node)}[self.sharding]

    @property
    def replicas(self) -> int:
        """How many hold the same shard."""
        return self.processes // self.among


def of_machine(processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """How many of some processes that were launched together run on this machine."""
    return int(environment.get("LOCAL_WORLD_SIZE", processes))


def layout_of(config: RunConfig, of_node: int = OF_NODE) -> Layout:
    """The layout of a run whose machines have so many GPUs."""
    return Layout(processes=config.run.processes, of_node=of_node, sharding=config.run.sharding)
