"""Display of untrusted text with terminal control characters and direction changes escaped; and of counts."""

from __future__ import annotations

import re

# Control characters except tab and newline, other line ends, direction changes, surrogates.
HIDDEN = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
LONGEST_LINE = 1000  # characters


def readable(text: str) -> str:
    """Return a text with `HIDDEN` characters as Python escapes (`\\x1b`)."""
    return re.sub(HIDDEN, lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return a text, made `readable`, as one line of at most `LONGEST_LINE` characters; a longer text loses its middle."""
    line = readable(text).expandtabs(1).replace("\n", r"\n")
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 205]} ... {line[-200:]}"


def counted(number: int, word: str) -> str:
    """Format a number of things: 1 sample, 2 processes, 1,152 batches."""
    ending = "es" if word.endswith(("ch", "ss")) else "s"
    return f"{number:,} {word}{ending * (number != 1)}"
