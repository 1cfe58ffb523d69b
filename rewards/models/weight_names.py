"""Explain which weights a model's files lack."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator

SHOWN = 3
ENOUGH = 0.5  # share of the missing names that a prefix must explain


def describe_missing(missing: Collection[str], surplus: Collection[str], total: int, kind: str) -> str:
    """Return the end of a sentence about a file: the weights that it lacks, and a prefix or similar names as explanation.

    `missing` are names of weights that the files lack, of the `total` of class `kind`. `surplus` are names that only the
    files have.
    """
    first = sorted(missing)[:SHOWN]
    count = f"all {total}" if len(missing) == total else f"{len(missing)} of the {total}"
    sentence = f"lacks {count} weights of {kind} ({', '.join(first)}{', ...' * (len(missing) > SHOWN)})"
    for prefix, word in ((_prefix(surplus, missing), "without"), (_prefix(missing, surplus), "with")):
        if prefix:
            return f"{sentence}; its names would match {word} the prefix {prefix!r}"
    similar = [match for name in first for match in difflib.get_close_matches(name, sorted(surplus), 1, cutoff=0.8)]
    return f"{sentence}; it has {', '.join(dict.fromkeys(similar))} instead" if similar else sentence


def _prefix(longer: Collection[str], shorter: Collection[str]) -> str | None:
    """Return the prefix that turns most of the shorter names into longer ones, or None."""
    known = set(shorter)
    prefixes = Counter(name.removesuffix(end) for name in longer for end in _suffixes(name) if end in known)
    ((prefix, count),) = prefixes.most_common(1) or [("", 0)]
    return prefix if count >= ENOUGH * len(known) > 0 else None


def _suffixes(name: str) -> Iterator[str]:
    """Yield a dotted name without its first part, its first two parts, and so on."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
