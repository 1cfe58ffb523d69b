"""Processes that do a job together beside their work, as writing a checkpoint: it succeeds on all, or fails on all."""

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
    """The processes of a job, which all of them do in the same order; one alone by default.

    Attributes:
        rank: of this process among them.
        group: in which they talk on the host, of their own, so that it crosses nothing that the training says.
    """

    rank: int = 0
    group: distributed.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this process does what one does for all."""
        return self.rank == 0

    def together(self, job: Callable[[], Result]) -> list[Result]:
        """Run a job on every process, and return all results in their order.

        Raises:
            Exception: the job failed, here or elsewhere; then it is raised everywhere.
        """
        if self.group is None:
            return [job()]
        result: Result | None = None
        failed: Exception | None = None
        try:
            result = job()
        except Exception as error:
            failed = error
        everyone: list[tuple[Any, Exception | None]] = [(None, None)] * distributed.get_world_size(self.group)
        distributed.all_gather_object(everyone, (result, _portable(failed)), group=self.group)
        for error in (failed, *(other for _, other in everyone)):
            if error is not None:
                raise error
        return [found for found, _ in everyone]


def of_first(processes: int) -> Peers:
    """The first so many processes of a run; all of the run must ask for them together."""
    if processes == 1:
        return Peers()
    group = distributed.new_group(list(range(processes)), backend="gloo", timeout=PATIENCE)
    return Peers(distributed.get_rank(), cast("distributed.ProcessGroup", group))  # who is no member does no job in it


def _portable(error: Exception | None) -> Exception | None:
    """An error that can be sent to another process, with the system's number of it."""
    if error is None or isinstance(error, OSError | torch.OutOfMemoryError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
