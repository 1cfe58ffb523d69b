"""What other processes told this one during a piece of work, so that it can make the work again without asking them anew.

Processes meet in the middle of a rollout or of a gradient: they sum numbers and exchange samples. Where one of them runs out
of memory and begins again, the others are past some of these meetings. So a process notes what each gave it. When it comes
to the same meeting again it takes the note, and it meets the others at the first that it has not been to. All processes then
have what they had of each other at first, though what is made again in smaller calls may differ by rounding.

Notes are kept until the work ends, so that what processes sent each other (of a group that they share, the decoded samples)
lies in memory as long.

Work that fails within a meeting, or in another step that cannot be taken twice, is not made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Journal:
    """The notes of one piece of work.

    Attributes:
        met: to how many meetings the work has come so far; set back where a part of it is made again.
        final: whether it failed in what cannot be taken twice.
    """

    def __init__(self) -> None:
        self._notes: list[Any] = []
        self.met, self.final = 0, False

    def told(self, meet: Callable[[], T]) -> T:
        """What a meeting gives, or gave."""
        if self.met == len(self._notes):
            with taken_once():
                self._notes.append(meet())
        self.met += 1
        return self._notes[self.met - 1]


_KEPT: ContextVar[Journal | None] = ContextVar("journal", default=None)


@contextmanager
def kept() -> Iterator[Journal]:
    """Note all meetings inside this context, in the journal that is kept around it, if there is one."""
    outer = _KEPT.get()
    if outer is not None:
        yield outer
        return
    own = Journal()
    token = _KEPT.set(own)
    try:
        yield own
    finally:
        _KEPT.reset(token)


def told(meet: Callable[[], T]) -> T:
    """What a meeting of processes gives; noted where a journal is kept, and taken from it where the work is made again.

    What is returned must not be changed in place.
    """
    journal = _KEPT.get()
    return meet() if journal is None else journal.told(meet)


@contextmanager
def taken_once() -> Iterator[None]:
    """Do inside this context what cannot be done twice: if it fails, the work that it is a part of is not made again."""
    try:
        yield
    except BaseException:
        journal = _KEPT.get()
        if journal is not None:
            journal.final = True
        raise
