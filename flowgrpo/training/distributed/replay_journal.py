"""Record the results of collectives during a piece of work, so that this process can repeat it without the others.

Processes communicate in the middle of a rollout or of a gradient. If one runs out of memory and repeats the work, the others
have passed some of these collectives. It takes their recorded results, and joins the others at the first collective that it
has not reached before. All processes keep the results of the first attempt, though repeated calls of another size may round
differently.

Results stay in memory until the work ends. Work that fails within a collective, or in a step that must not run twice, is not
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Journal:
    """The recorded results of the collectives of one piece of work."""

    results: list[Any] = field(default_factory=list)
    met: int = 0  # collectives that it has reached; set back to repeat a part
    final: bool = False  # whether it failed where it must not be repeated


_JOURNAL: ContextVar[Journal | None] = ContextVar("journal", default=None)


@contextmanager
def kept() -> Iterator[Journal]:
    """Record all collectives inside this context; a nested context uses the outer journal."""
    outer = _JOURNAL.get()
    if outer is not None:
        yield outer
        return
    journal = Journal()
    token = _JOURNAL.set(journal)
    try:
        yield journal
    finally:
        _JOURNAL.reset(token)


def told(meet: Callable[[], T]) -> T:
    """Return the result of a collective, recorded if there is a journal; do not change it in place."""
    journal = _JOURNAL.get()
    if journal is None:
        return meet()
    if journal.met == len(journal.results):
        with taken_once():
            journal.results.append(meet())
    journal.met += 1
    return journal.results[journal.met - 1]


@contextmanager
def taken_once() -> Iterator[None]:
    """Mark work that must not run twice: if it fails, the surrounding work is not repeated."""
    try:
        yield
    except BaseException:
        journal = _JOURNAL.get()
        if journal is not None:
            journal.final = True
        raise
