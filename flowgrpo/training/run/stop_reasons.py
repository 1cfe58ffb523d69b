"""Reasons why a run ends before its last iteration."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(Exception):
    """The run ended early; `status` is the exit status of the command.

    `rest` names the checkpoint to resume from, and `overrides` are options to append to the original command.
    """

    status: int = 1

    def __init__(self, sentence: str, rest: str, overrides: Sequence[str] = ("run.resume=true",)):
        super().__init__(sentence)
        self.rest, self.overrides = rest, tuple(overrides)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rest, self.overrides)  # pickled for other processes


class Interrupted(Stopped):
    """The user asked the run to stop."""

    status = 130


class NothingToLearn(Stopped):
    """The last `run.patience` iterations had no nonzero advantage or no update; `learning_signal.is_idle` decides."""


class Diverged(Stopped):
    """The trained weights are not finite; checkpoints are older."""


class Broken(Stopped):
    """The run completed, but its final weights cannot be trusted; see `learning_signal.broken`."""


class Finished(Stopped):
    """`run.resume: auto` found no iteration left."""

    status = 0


class EngineLost(Stopped):
    """An external engine failed a rollout; a checkpoint of all earlier iterations was written."""


class RanOutOfMemory(Stopped):
    """Memory ran out; checkpoints are older."""


class DiskFull(Stopped):
    """A file could not be written; checkpoints are older."""


class Lost(Stopped):
    """A process that cannot be replaced ended; checkpoints are older."""


class Killed(Stopped):
    """A signal ended a process of the run; checkpoints are older."""

    def __init__(self, sentence: str, rest: str, overrides: Sequence[str], *, status: int):
        super().__init__(sentence, rest, overrides)
        self.status = status


# Parts of the RuntimeErrors of gloo and NCCL about a lost process.
GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Failed to recv",
    "failed to recv",
)


def is_lost(error: BaseException) -> bool:
    """Return whether an error reports another process of this run as lost."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)


class StopRequest:
    """Whether the run was asked to stop (`is_set`)."""

    is_set = False


def unignored_signals(numbers: Sequence[int]) -> list[int]:
    """Return those signals that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record Ctrl-C and SIGTERM instead of dying; a second Ctrl-C interrupts at once. Ignored signals stay ignored."""
    stop = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set and number == signal.SIGINT:
            at_once = before[signal.SIGINT]
            if callable(at_once):
                at_once(number, frame)
            raise KeyboardInterrupt
        stop.is_set = True

    try:
        before = {number: signal.signal(number, ask) for number in unignored_signals((signal.SIGINT, signal.SIGTERM))}
    except ValueError:  # not in the main thread
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
