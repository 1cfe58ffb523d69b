"""Texts of others made fit to look at: no characters that steer a terminal, or show a text in another order than it has."""

from __future__ import annotations

import re

# Control characters but for tabs and ends of lines, other ends of lines, turns of the direction of writing, half characters.
HIDDEN = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
LONGEST_LINE = 1000  # characters


def readable(text: str) -> str:
    """A text with the `HIDDEN` characters as Python writes them; all others, of whatever script, are as they were."""
    return re.sub(HIDDEN, lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """A readable text whose ends of lines are seen as well, without its middle where it is longer than `LONGEST_LINE`."""
    line = readable(text).expandtabs(1).replace("\n", r"\n")
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 205]} ... {line[-200:]}"
