"""Exceptions that end a run, and requests to stop by signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(Exception):
    """The base class of reasons to end a run.

    `rest` is a phrase about the checkpoint, printed before the command to resume. That command is the original command
    with `overrides` appended.
    """

    status: int = 1  # exit status of the command

    def __init__(self, sentence: str, rest: str, overrides: Sequence[str] = ("run.resume=true",)):
        super().__init__(sentence)
        self.rest, self.overrides = rest, tuple(overrides)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rest, self.overrides)  # pickled for other processes


class Interrupted(Stopped):
    """The user asked the run to stop."""

    status = 130


class NothingToLearn(Stopped):
    """The last `run.patience` iterations, or all of the run, learnt nothing; see `learning_signal`."""


class Diverged(Stopped):
    """The trained weights are not finite; no checkpoint of this iteration was written."""


class Broken(Stopped):
    """The run completed, but its final weights cannot be trusted; see `learning_signal.broken`."""


class Finished(Stopped):
    """`run.resume: auto` found that the run was finished already."""

    status = 0


class EngineLost(Stopped):
    """An external engine failed to roll out; a checkpoint of the finished iterations was written."""


class RanOutOfMemory(Stopped):
    """Memory ran out; no checkpoint was written at that point."""


class DiskFull(Stopped):
    """A file could not be written; no checkpoint was written at that point."""


class Lost(Stopped):
    """A process that the run cannot do without ended; no checkpoint was written at that point."""


class Killed(Stopped):
    """A signal ended a process of the run; no checkpoint was written at that point."""

    def __init__(self, sentence: str, rest: str, overrides: Sequence[str], *, status: int):
        super().__init__(sentence, rest, overrides)
        self.status = status


# Phrases in the RuntimeErrors that gloo and NCCL raise when a process is lost.
GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Failed to recv",
    "failed to recv",
)


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that another process of this run is lost."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)


class StopRequest:
    """A flag, `is_set`: whether the user or the system asked the run to stop."""

    is_set = False


def unignored_signals(numbers: Sequence[int]) -> list[int]:
    """Return the signals among `numbers` that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Yield a StopRequest that Ctrl-C or SIGTERM sets, instead of ending the process.

    A Ctrl-C after the first signal raises KeyboardInterrupt at once. Ignored signals stay ignored.
    """
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
