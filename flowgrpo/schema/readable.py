"""Texts of others made fit to look at: no control characters, which steer a terminal and which Markdown drops."""

from __future__ import annotations

import re


def readable(text: str) -> str:
    """A text with control characters, but for tabs and ends of lines, and lone surrogates as Python writes them."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: repr(found[0])[1:-1], text)
