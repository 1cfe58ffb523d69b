"""Entry point of `flowgrpo`, `python -m flowgrpo` and `accelerate launch -m flowgrpo`.

Ctrl-C ends the program with one line at any time: the signal handler is installed before any heavy import.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130


def entry() -> NoReturn:
    """Run the command line, and exit with its status."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupts.append(number)
        if len(interrupts) > 1:
            _end()
        raise KeyboardInterrupt

    def handle_unraisable(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # raised in __del__, say
            _end()
        hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, handle_unraisable
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # scripts ignore it for background jobs
            signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `launch` blocks SIGINT while it starts processes
        from flowgrpo.cli import main

        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_closed(sys.stdout.fileno()):  # of a worker or an engine
            raise
        os._exit(1)  # as for `flowgrpo | head`; a normal exit would try to write what is left
    except BaseException:
        if interrupts:  # other code may have turned KeyboardInterrupt into another error
            _end()
        raise
    if interrupts and status == INTERRUPTED:
        _end("")
    sys.exit(status)


def _is_closed(stream: int) -> bool:
    """Return whether no process reads from a pipe any more."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end(last_words: str = "flowgrpo: interrupted\n") -> NoReturn:
    """Print `last_words` on stderr and end the process at once, without cleanup and without waiting for threads."""
    try:
        sys.stdout.flush()
        sys.stderr.write(last_words)
        sys.stderr.flush()
    finally:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    entry()
