"""Hypothesis's cases put through one function, and counted."""

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from unicodedata import category

import hypothesis
from hypothesis import HealthCheck, Phase, strategies

LONGEST = 5.0  # seconds of a case
LONGEST_SENTENCE = 1000  # characters
Case = TypeVar("Case")


@dataclass(frozen=True)
class Summary:
    """The figures of a fuzz; each failure is the smallest case that ended otherwise, and how."""

    subject: str
    cases: int
    accepted: int
    refused: int
    failures: tuple[str, ...]
    slowest: float  # seconds of a case


def run(
    subject: str, cases: strategies.SearchStrategy[Case], attempt: Callable[[Case], str | None], seed: int, count: int
) -> Summary:
    """Put `count` cases through; the same seed gives the same cases.

    `attempt` returns None where it accepts a case, else the sentence that refuses it, and raises on anything else.
    Long or multi-line sentences, and more than `LONGEST` seconds, are failures too.
    """
    accepted = refused = 0
    slowest, smallest = 0.0, None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(cases)
    def once(case: Case) -> None:
        nonlocal accepted, refused, slowest, smallest
        smallest = case  # where one fails, hypothesis ends with the smallest that does
        started = time.perf_counter()
        said = attempt(case)
        seconds = time.perf_counter() - started
        slowest = max(slowest, seconds)
        assert seconds <= LONGEST, f"took {seconds:.1f} s"
        assert said is None or is_sentence(said), f"no short sentence of one line: {said!r}"
        accepted, refused = accepted + (said is None), refused + (said is not None)

    failures = ()
    try:
        once()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        failures = (f"{smallest!r}: {type(error).__name__}: {error} ({at.filename}:{at.lineno})",)
    return Summary(subject, accepted + refused + len(failures), accepted, refused, failures, slowest)


def refusal(status: int, said: str) -> str:
    """Return the sentence of a refused command, which names a place."""
    assert status == 2, f"exit status {status}"
    said = said.removeprefix("flowgrpo: ").removesuffix("\n")
    assert re.match(r".+?: .", said), f"no place is named: {said!r}"
    return said


def is_sentence(said: str) -> bool:
    return 0 < len(said) <= LONGEST_SENTENCE and not {category(c) for c in said} & {"Cc", "Cs", "Zl", "Zp"}
