"""Requests to stop a run: Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Whether a run has been asked to stop, in `is_set`."""

    is_set = False


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Note Ctrl-C and SIGTERM instead of dying of them; the second Ctrl-C interrupts at once."""
    stop = StopRequest()

    def ask(number: int, frame: object) -> None:
        if stop.is_set and number == signal.SIGINT:
            at_once = before[signal.SIGINT]
            if callable(at_once):
                at_once(number, frame)
            raise KeyboardInterrupt
        stop.is_set = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where nobody presses Ctrl-C
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
