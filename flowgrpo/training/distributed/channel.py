"""What processes that train and the others send each other: versions of the weights, rollouts, evaluations.

It travels on the host, in a group of its own, so that nothing else waits for it. Versions are sent without waiting for who
receives them: a generator that sends a rollout would wait for a trainer that sends a version, and that one for it.
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
    """There is nothing more to do for those that train; why the run stopped, if it did."""

    stopped: Stopped | None

    def raised(self) -> None:
        """Stop here, too.

        Raises:
            Stopped: the run did.
        """
        if self.stopped is not None:
            raise self.stopped


Packed = tuple[torch.Tensor, torch.Tensor]  # the size of a message, and its bytes
PATIENCE = timedelta(
    days=30
)  # whoever ends is noticed at once; a rollout or an evaluation may take longer than any limit


class Channel:
    """Messages between two processes each; what one sends to another arrives in that order. All must make theirs together.

    Args:
        device: that tensors of a GPU come to.
    """

    def __init__(self, device: torch.device):
        self._device = device
        group = distributed.new_group(backend="gloo", timeout=PATIENCE)
        self._group = cast("distributed.ProcessGroup", group)  # all are members
        self._under_way: dict[int, deque[list[tuple[distributed.Work, torch.Tensor]]]] = defaultdict(deque)

    def send(self, message: Any, to: int) -> None:
        """Send a message, and wait until it has been received.

        Raises:
            RuntimeError: the other process has ended.
        """
        for content in packed(message):
            distributed.send(content, to, group=self._group)

    def post(self, message: Packed, to: int, behind: int) -> None:
        """Send a message without waiting for it, but for the ones before it.

        Args:
            message: `packed`, once for all whom it goes to.
            behind: how many messages the other may not have asked for yet; for older ones is waited, and they are forgotten.

        Raises:
            RuntimeError: the other process has ended.
        """
        sent = self._under_way[to]
        under_way = [(distributed.isend(content, to, group=self._group), content) for content in message]
        sent.append(cast("list[tuple[distributed.Work, torch.Tensor]]", under_way))  # no work is none of a member
        while len(sent) > behind:
            for work, _ in sent.popleft():
                work.wait()

    def flush(self, to: int) -> None:
        """Wait until all that was posted to a process has been received.

        Raises:
            RuntimeError: the other process has ended.
        """
        for work, _ in (each for message in self._under_way.pop(to, ()) for each in message):
            work.wait()

    def receive(self, sender: int) -> torch.Tensor:
        """Wait for the next message of a process; `unpacked` reads it.

        Raises:
            RuntimeError: it has ended.
        """
        size = torch.empty(1, dtype=torch.int64)
        distributed.recv(size, sender, group=self._group)
        content = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(content, sender, group=self._group)
        return content

    def unpacked(self, content: torch.Tensor) -> Any:
        """What a message says; any object may, for it comes from a process of this run."""
        buffer = io.BytesIO(content.numpy().data)
        place: Any = self._place  # torch's type of it knows no None, which leaves a storage where it is
        return torch.load(buffer, map_location=place, weights_only=False)

    def _place(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage | None:
        """What was on the host stays there; what was on a GPU comes to this process's."""
        return None if tag == "cpu" else torch.serialization.default_restore_location(storage, str(self._device))


def packed(message: Any) -> Packed:
    """A message as it travels."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    return torch.tensor([len(content)]), content
