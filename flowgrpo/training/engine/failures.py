"""How an engine fails, in one sentence that begins with its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

KEY = "run.engine"


class EngineError(Exception):
    """An engine is not there, or did not do what it was asked; the message is one sentence."""


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Begin what is wrong with an answer with the place that it came from."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{place} {error}") from None
