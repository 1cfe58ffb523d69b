"""Messages between trainers, generators and evaluators: weights, rollouts, evaluations.

Trainers post weights without waiting for the receiver. If they waited, a generator that sends a rollout and a trainer
that sends weights would block each other.
"""

from __future__ import annotations

import io
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed

from flowgrpo.training.run.stop_reasons import Stopped


@dataclass(frozen=True)
class End:
    """A message that training has ended; `stopped` is the reason if it ended early."""

    stopped: Stopped | None

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if the run was stopped."""
        if self.stopped is not None:
            raise self.stopped


Packed = tuple[torch.Tensor, torch.Tensor]  # the size of a message, and its bytes
# A rollout or an evaluation may take very long. A process that dies is noticed at once, without this limit.
PATIENCE = timedelta(days=30)


class Channel:
    """Ordered messages between pairs of processes. Received GPU tensors are put on `device`.

    All processes must create their channels together.
    """

    def __init__(self, device: torch.device):
        self._device = device
        group = distributed.new_group(backend="gloo", timeout=PATIENCE)
        self._group = cast("distributed.ProcessGroup", group)  # all ranks are members
        self._under_way: dict[int, deque[list[tuple[distributed.Work, torch.Tensor]]]] = defaultdict(deque)

    def send(self, message: Any, to: int) -> None:
        """Send a message and wait until it is received. Raises RuntimeError if the other process has ended."""
        for content in pack(message):
            distributed.send(content, to, group=self._group)

    def post(self, message: Packed, to: int, behind: int) -> None:
        """Send a message packed by `pack`; return once at most `behind` messages to process `to` are still under way.

        Raises RuntimeError if the other process has ended.
        """
        sent = self._under_way[to]
        under_way = [(distributed.isend(content, to, group=self._group), content) for content in message]
        # `isend` returns None to non-members only.
        sent.append(cast("list[tuple[distributed.Work, torch.Tensor]]", under_way))
        while len(sent) > behind:
            for work, _ in sent.popleft():
                work.wait()

    def flush(self, to: int) -> None:
        """Wait until process `to` has received all posted messages. Raises RuntimeError if it has ended."""
        for work, _ in (each for message in self._under_way.pop(to, ()) for each in message):
            work.wait()

    def receive(self, sender: int) -> torch.Tensor:
        """Wait for the next message from `sender`; return its pickled bytes, for `unpack`. Raises as `send`."""
        size = torch.empty(1, dtype=torch.int64)
        distributed.recv(size, sender, group=self._group)
        content = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(content, sender, group=self._group)
        return content

    def unpack(self, content: torch.Tensor) -> Any:
        """Unpickle a message of any type. It must come from a process of this run, since unpickling can run code."""
        buffer = io.BytesIO(content.numpy().data)
        place: Any = self._place  # torch's type lacks None, which leaves a storage where it is
        return torch.load(buffer, map_location=place, weights_only=False)

    def _place(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage | None:
        return None if tag == "cpu" else torch.serialization.default_restore_location(storage, str(self._device))


def pack(message: Any) -> Packed:
    """Pickle a message of any type."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    return torch.tensor([len(content)]), content
