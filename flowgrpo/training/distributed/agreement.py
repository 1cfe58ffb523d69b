"""Jobs that several processes do together, such as writing a checkpoint: an error on one is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from flowgrpo.training.distributed.channel import PATIENCE

Result = TypeVar("Result")


@dataclass(frozen=True)
class Peers:
    """The processes that do the same jobs in the same order, over a gloo group; by default this process alone."""

    rank: int = 0
    group: distributed.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is the first process, which does the work that is done once for all."""
        return self.rank == 0

    def together(self, job: Callable[[], Result]) -> list[Result]:
        """Run a job on every process and return the results by rank; an error on one process is raised on all."""
        if self.group is None:
            return [job()]
        result: Result | None = None
        own_error: Exception | None = None
        try:
            result = job()
        except Exception as error:
            own_error = error
        outcomes: list[tuple[Any, Exception | None]] = [(None, None)] * distributed.get_world_size(self.group)
        distributed.all_gather_object(outcomes, (result, _make_portable(own_error)), group=self.group)
        for error in (own_error, *(other for _, other in outcomes)):
            if error is not None:
                raise error
        return [each for each, _ in outcomes]


def of_first(processes: int) -> Peers:
    """Return Peers of the first `processes` ranks of a run; a collective call of all ranks."""
    if processes == 1:
        return Peers()
    group = distributed.new_group(list(range(processes)), backend="gloo", timeout=PATIENCE)
    return Peers(distributed.get_rank(), cast("distributed.ProcessGroup", group))  # not used on other ranks


def _make_portable(error: Exception | None) -> Exception | None:
    """Return an error that can be pickled. An OSError (for its errno) and torch's OutOfMemoryError are left unchanged."""
    if error is None or isinstance(error, OSError | torch.OutOfMemoryError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
