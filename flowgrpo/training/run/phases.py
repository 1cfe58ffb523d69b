"""The phases of a command's work: what is shown of it, and where it was when memory ran out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from flowgrpo.training.run.out_of_memory import OutOfMemory
from rewards.memory import is_out_of_memory

clock = time.monotonic


@dataclass(kw_only=True, eq=False)
class Phase:
    """A part of the work that takes a while.

    Attributes:
        name: as people read it; those of a run are the keys of `memory_advice.SWITCHES`.
        total: how many things it goes through; None where nobody counts.
        done: how many of them so far.
        started: when, by `clock`.
    """

    name: str
    total: int | None
    started: float
    done: int = 0

    def advance(self, count: int = 1) -> None:
        """Count some things as done."""
        self.done = self.done + count if self.total is None else min(self.done + count, self.total)
        _tell()


class Watcher(Protocol):
    """Somebody who wants to know when the phase changes, or goes on."""

    def changed(self) -> None:
        """Look at `now` again."""


_open: list[Phase] = []  # from the outermost to the innermost
_watchers: list[Watcher] = []


@contextmanager
def phase(name: str, total: int | None = None) -> Iterator[Phase]:
    """Be in a phase, within those that are open; `advance` of what is yielded counts.

    Raises:
        OutOfMemory: memory ran out in it, and in no phase within it.
    """
    own = Phase(name=name, total=total, started=clock())
    _open.append(own)
    _tell()
    try:
        yield own
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, OutOfMemory):
            raise OutOfMemory(name, error) from error
        raise
    finally:
        _open.remove(own)
        _tell()


def now() -> Phase | None:
    """The phase to show: the outermost that counts, for it says most of the end, or else the innermost."""
    opened = list(_open)  # others may be asking from a thread of their own
    return next((one for one in opened if one.total), opened[-1] if opened else None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell somebody of the phases for a while."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _tell() -> None:
    for watcher in _watchers:
        watcher.changed()
