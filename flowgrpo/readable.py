"""Texts of others made fit to look at: no control characters, which steer a terminal and which Markdown drops."""

from __future__ import annotations

import re

LONGEST_LINE = 1000  # characters


def readable(text: str) -> str:
    """A text with control characters, but for tabs and ends of lines, and lone surrogates as Python writes them."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """A readable text in one line, without its middle where it has more than `LONGEST_LINE` characters."""
    line = " ".join(readable(text).expandtabs(1).splitlines())
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 205]} ... {line[-200:]}"
