"""What a fuzz found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The figures of a fuzz.

    Attributes:
        cases: how many were tried.
        accepted: those of them that went through.
        refused: those of them that were refused in one sentence.
        failures: each the smallest case that ended otherwise, and how.
        slowest: seconds of the slowest case.
    """

    subject: str
    cases: int
    accepted: int
    refused: int
    failures: tuple[str, ...]
    slowest: float
