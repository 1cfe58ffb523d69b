"""Why a run ends before its last iteration."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(Exception):
    """The run ended early; `status` is what the command exits with.

    Args:
        sentence: where, and why.
        rest: which checkpoint a resume goes on from, as the head of the command.
        overrides: what the command has at its end, over what it was given.
    """

    status: int = 1

    def __init__(self, sentence: str, rest: str, overrides: Sequence[str] = ("run.resume=true",)):
        super().__init__(sentence)
        self.rest, self.overrides = rest, tuple(overrides)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rest, self.overrides)  # to be told to another process


class Interrupted(Stopped):
    """The run was asked to stop."""

    status = 130


class NothingToLearn(Stopped):
    """The last `run.patience` iterations had no advantage other than 0, or no update that could be made."""


class Diverged(Stopped):
    """The trained weights are not finite, and no iteration can mend them; checkpoints are of before."""


class Broken(Stopped):
    """The run took all its iterations, and the weights that it ends with cannot be trusted; see `learning_signal.broken`."""


class Finished(Stopped):
    """With `run.resume: auto` no iteration was left to be taken."""

    status = 0


class EngineLost(Stopped):
    """An engine outside did not roll out what it was asked for; a checkpoint of all iterations before was written."""


class RanOutOfMemory(Stopped):
    """Memory ran out, in an iteration or before the first; checkpoints are of before."""


class DiskFull(Stopped):
    """A file of the run could not be written; checkpoints are of before."""


class Lost(Stopped):
    """A process of the run has ended that the others cannot stand in for; checkpoints are of before."""


class Killed(Stopped):
    """A process of the run was ended by a signal; checkpoints are of before."""

    def __init__(self, sentence: str, rest: str, overrides: Sequence[str], *, status: int):
        super().__init__(sentence, rest, overrides)
        self.status = status


# What gloo and NCCL say of a process that has gone, in a RuntimeError.
GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Failed to recv",
    "failed to recv",
)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process of this run has gone; whoever raised it failed in nothing."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)


class StopRequest:
    """Whether a run has been asked to stop, in `is_set`."""

    is_set = False


def heard(numbers: Sequence[int]) -> list[int]:
    """Those of some signals that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Note Ctrl-C and SIGTERM instead of dying of them; the second Ctrl-C interrupts at once.

    One that is ignored, as Ctrl-C is in the background of a script, stays so.
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
        before = {number: signal.signal(number, ask) for number in heard((signal.SIGINT, signal.SIGTERM))}
    except ValueError:  # not in the main thread, where nobody presses Ctrl-C
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
