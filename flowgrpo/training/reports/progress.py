"""Where a command is, told on stderr: one live line on a terminal, elsewhere a plain line now and then.

Nothing here is asked for by what computes: a display looks at `phases.now`, in a thread of its own, twice a second or less.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flowgrpo.training.run import phases
from flowgrpo.training.run.phases import Phase

EVERY = 30.0  # seconds between two lines about phases where there is no terminal
BACKWARD = 3  # forward passes that one with its backward pass costs, about
LOADING = "loading"  # while others may show bars of their downloads


class Display:
    """Shows the phases while it is entered.

    Args:
        console: where; a quiet one shows nothing.
        every: seconds between two lines where there is no terminal.

    Attributes:
        interactive: whether there is a terminal on which a line can change.
        step: of a run, said before its phase.
        numbers: of its last step, said after it.
        left: seconds to its end, None where that is unknown.
    """

    def __init__(self, console: Console, every: float = EVERY):
        self.console, self.every = console, every
        self.interactive = console.is_terminal and not console.is_dumb_terminal
        self.step = self.numbers = ""
        self.left: Callable[[], float | None] = lambda: None
        self._live: Live | None = None
        self._said = phases.clock()  # what is refused at once is said alone
        self._loading: Phase | None = None
        self._first: str | None = None
        self._closed = threading.Event()

    def __enter__(self) -> Display:
        if not self.console.quiet and not self.interactive:
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._hide()

    def line(self) -> str:
        """What is to be said now; empty outside all phases."""
        now, left = phases.now(), self.left()
        if now is None:
            return ""
        ends = "" if left is None else f"ETA {duration(left)}"
        return "  ".join(words for words in (self.step, said(now), self.numbers, ends) if words)

    def changed(self) -> None:
        """Look at the phases again: one has begun, goes on or has ended."""
        if self.console.quiet:
            return
        now = phases.now()
        if not self.interactive:
            self.tell()
        elif now is None:
            self._hide()
        elif now.name != LOADING:
            self._show()
        else:
            self._hide()
            if now is not self._loading:
                self.console.print(LOADING)
            self._loading = now

    def tell(self) -> None:
        """Print the line where there is no terminal, unless something was printed within the last `every` seconds."""
        line = self.line()
        if line and phases.clock() - self._said >= self.every:
            self.print(line)

    def print(self, words: str | Text) -> None:
        """Print something that stays, above the live line."""
        self._said = phases.clock()
        first, self._first = self._first, None
        for each in (words,) if first is None else (first, words):
            self.console.print(each, soft_wrap=True, highlight=False, markup=False)

    def begin(self, words: str) -> None:
        """Print something before all else; in a log not before there is more to print, so that a refusal stands alone."""
        if self.interactive:
            self.print(words)
        else:
            self._first = words

    def _tick(self) -> None:
        while not self._closed.wait(self.every / 10):
            self.tell()

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=lambda: Text(self.line(), no_wrap=True, overflow="ellipsis"),
                console=self.console,
                refresh_per_second=2,
                transient=True,
                redirect_stdout=False,  # which may go elsewhere
            )
            self._live.start()

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


_shown: list[Display] = []


@contextmanager
def shown(main: bool = True) -> Iterator[Display]:
    """The display of this process, which shows the phases from here on: the one that does so already, or a new one.

    Args:
        main: whether this process is the one that speaks.
    """
    if _shown:
        yield _shown[-1]
        return
    with Display(Console(stderr=True, quiet=not main)) as display, phases.watched(display):
        _shown.append(display)
        try:
            yield display
        finally:
            _shown.remove(display)


def said(phase: Phase) -> str:
    """A phase in words: how far it is and how long it will take where it counts, or else how long it has taken."""
    passed = phases.clock() - phase.started
    if not phase.total:
        return f"{phase.name} {duration(passed)}" if passed >= 1 else phase.name
    rest = f", {duration(passed / phase.done * (phase.total - phase.done))} left" if phase.done else ""
    return f"{phase.name} {phase.done}/{phase.total}{rest}"


def duration(seconds: float) -> str:
    """Minutes and seconds, `1:05`, or hours too, `1:00:05`."""
    minutes, rest = divmod(int(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
