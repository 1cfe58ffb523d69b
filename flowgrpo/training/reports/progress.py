"""Progress display on stderr: one live line on a terminal, else a plain line from time to time.

It reads `phases.current_phase` in its own thread, at most twice a second.
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

EVERY = 30.0  # seconds between two lines without a terminal
BACKWARD = 3  # approximate cost of a forward and backward pass, in forward passes
LOADING = "loading"  # phase without a live line, since libraries may show download bars


class Display:
    """A display of the current phase: a live line, or without a terminal a line after `first` and each `every` seconds."""

    def __init__(self, console: Console, every: float = EVERY, first: float | None = None):
        self.console, self.every = console, every
        self.interactive = console.is_terminal and not console.is_dumb_terminal
        self.step = self.numbers = ""  # words about the run, shown before and after the phase
        self.left: Callable[[], float | None] = lambda: None  # returns the seconds until the end of the run
        self._live: Live | None = None
        self._said = phases.clock() - (0.0 if first is None else every - first)
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
        """Return the progress line; an empty text outside of all phases."""
        now, left = phases.current_phase(), self.left()
        if now is None:
            return ""
        ends = "" if left is None else f"ETA {duration(left)}"
        return "  ".join(words for words in (self.step, describe(now), self.numbers, ends) if words)

    def changed(self) -> None:
        """Update the display after a change of the phases."""
        if self.console.quiet:
            return
        now = phases.current_phase()
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
        """Print the progress line, unless a line was printed in the last `every` seconds. For use without a terminal."""
        line = self.line()
        if line and phases.clock() - self._said >= self.every:
            self.print(line)

    def print(self, words: str | Text) -> None:
        """Print a permanent line above the live one."""
        self._said = phases.clock()
        first, self._first = self._first, None
        for each in (words,) if first is None else (first, words):
            self.console.print(each, soft_wrap=True, highlight=False, markup=False)

    def begin(self, words: str) -> None:
        """Print a first line. Without a terminal it waits for the second line, so that an early error is the only output."""
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
                redirect_stdout=False,  # stdout may be a pipe
            )
            self._live.start()

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


_shown: list[Display] = []


@contextmanager
def open_display(main: bool = True, first: float | None = None) -> Iterator[Display]:
    """Yield the display of this process: the open one, or else a new one, which prints only if `main`; see `Display`."""
    if _shown:
        yield _shown[-1]
        return
    with Display(Console(stderr=True, quiet=not main), first=first) as display, phases.watch(display.changed):
        _shown.append(display)
        try:
            yield display
        finally:
            _shown.remove(display)


def describe(phase: Phase) -> str:
    """Describe a phase: its progress and remaining time if it has a total, else the time so far."""
    passed = phases.clock() - phase.started
    if not phase.total:
        return f"{phase.name} {duration(passed)}" if passed >= 1 else phase.name
    rest = f", {duration(passed / phase.done * (phase.total - phase.done))} left" if phase.done else ""
    return f"{phase.name} {phase.done}/{phase.total}{rest}"


def duration(seconds: float) -> str:
    """Format seconds as `1:05` or `1:00:05`."""
    minutes, rest = divmod(int(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
