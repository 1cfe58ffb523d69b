"""Requests to stop a run: Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


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

    def ask(number: int, frame: object) -> None:
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
