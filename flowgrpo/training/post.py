"""What processes that train and processes that generate send each other: versions of the weights, and rollouts.

It travels on the host, in a group of its own, so that nothing else waits for it. Versions are sent without waiting for who
receives them: a generator that sends a rollout would wait for a trainer that sends a version, and that one for it.
"""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import torch
from torch import distributed


class Post:
    """Messages between two processes each; what one sends to another arrives in that order. All must make theirs together.

    Args:
        device: that tensors of a GPU come to.
    """

    def __init__(self, device: torch.device):
        self._device, self._group = device, distributed.new_group(backend="gloo")
        self._under_way: list[tuple[distributed.Work, torch.Tensor]] = []

    def send(self, message: Any, to: int) -> None:
        """Send a message, and wait until it has been received.

        Raises:
            RuntimeError: the other process has ended.
        """
        for content in _packed(message):
            distributed.send(content, to, group=self._group)

    def post(self, message: Any, to: int) -> None:
        """Send a message without waiting.

        Raises:
            RuntimeError: the other process has ended.
        """
        self._under_way = [(work, content) for work, content in self._under_way if not work.is_completed()]
        for content in _packed(message):
            self._under_way.append((distributed.isend(content, to, group=self._group), content))

    def flush(self) -> None:
        """Wait until all that was posted has been received, or its receiver has ended."""
        for work, _ in self._under_way:
            with suppress(RuntimeError):
                work.wait()
        self._under_way = []

    def receive(self, sender: int) -> Any:
        """Wait for the next message of a process.

        Raises:
            RuntimeError: it has ended.
        """
        size = torch.empty(1, dtype=torch.int64)
        distributed.recv(size, sender, group=self._group)
        content = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(content, sender, group=self._group)
        # Any object may come, for it comes from a process of this run.
        return torch.load(io.BytesIO(content.numpy()), map_location=self._place, weights_only=False)

    def _place(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage | None:
        """What was on the host stays there; what was on a GPU comes to this process's."""
        return None if tag == "cpu" else torch.serialization.default_restore_location(storage, str(self._device))


def _packed(message: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The size of a message, and its bytes."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    return torch.tensor([len(content)]), content
