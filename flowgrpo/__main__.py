"""`flowgrpo`, `python -m flowgrpo` and `accelerate launch -m flowgrpo`: from its first moment Ctrl-C ends it in one line.

Nothing heavy is imported before that is so.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130


def entry() -> NoReturn:
    """Run the command line, and exit with its status."""
    asked: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        asked.append(number)
        if len(asked) > 1:
            _end()
        raise KeyboardInterrupt

    def ignored(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # it came where Python can only drop it
            _end()
        hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, ignored
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
            signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `launch` starts its processes with it blocked
        from flowgrpo.cli import main

        status = main()
    except BaseException:
        if asked:  # whatever became of it on its way through others' code
            _end()
        raise
    if asked and status == INTERRUPTED:
        _end("")
    sys.exit(status)


def _end(last_words: str = "flowgrpo: interrupted\n") -> NoReturn:
    """End at once, however much is half done and whoever waits in a thread."""
    try:
        sys.stdout.flush()
        sys.stderr.write(last_words)
        sys.stderr.flush()
    finally:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    entry()
