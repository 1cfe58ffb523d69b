"""Phases of a command's work, for the progress display and out-of-memory errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from rewards.memory import is_out_of_memory

clock = time.monotonic


@dataclass(kw_only=True, eq=False)
class Phase:
    """A phase of the work."""

    name: str  # displayed name; in a run a key of `memory_advice.SWITCHES`
    total: int | None  # number of items; None if not counted
    started: float  # start time by `clock`
    done: int = 0  # number of items done

    def advance(self, count: int = 1) -> None:
        """Count items as done."""
        self.done = self.done + count if self.total is None else min(self.done + count, self.total)
        _notify()


_open: list[Phase] = []  # from the outermost to the innermost
_watchers: list[Callable[[], None]] = []


@contextmanager
def phase(name: str, total: int | None = None) -> Iterator[Phase]:
    """Open a phase inside the open ones and yield it. Out of memory is raised as OutOfMemory of the innermost phase."""
    opened = Phase(name=name, total=total, started=clock())
    _open.append(opened)
    _notify()
    try:
        yield opened
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, OutOfMemory):
            raise OutOfMemory(name, error) from error
        raise
    finally:
        _open.remove(opened)
        _notify()


def current_phase() -> Phase | None:
    """Return the phase to display: the outermost one with a total, else the innermost."""
    phases = list(_open)  # a copy: the display calls this from its own thread
    return next((each for each in phases if each.total), phases[-1] if phases else None)


@contextmanager
def watch(watcher: Callable[[], None]) -> Iterator[None]:
    """Call `watcher` on every change of the phases while the context is open."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _notify() -> None:
    for watcher in _watchers:
        watcher()
