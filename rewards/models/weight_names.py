"""What a model's files lack, said in a sentence: the names, and what they would match under another prefix."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator

SHOWN = 3
ENOUGH = 0.5  # share of the missing names that a prefix must explain


def lacking(missing: Collection[str], surplus: Collection[str], total: int, kind: str) -> str:
    """The part of a sentence after a file's name: what it lacks, and what it has in place of that.

    Args:
        missing: names of weights that the class has and the files do not.
        surplus: names that the files have and the class does not.
        total: number of weights of the class.
        kind: the name of the class.
    """
    first = sorted(missing)[:SHOWN]
    count = f"all {total}" if len(missing) == total else f"{len(missing)} of the {total}"
    said = f"lacks {count} weights of {kind} ({', '.join(first)}{', ...' * (len(missing) > SHOWN)})"
    for prefix, word in ((_prefix(surplus, missing), "without"), (_prefix(missing, surplus), "with")):
        if prefix:
            return f"{said}; its names would match {word} the prefix {prefix!r}"
    alike = [name for own in first for name in difflib.get_close_matches(own, sorted(surplus), 1, cutoff=0.8)]
    return f"{said}; it has {', '.join(dict.fromkeys(alike))} instead" if alike else said


def _prefix(longer: Collection[str], shorter: Collection[str]) -> str | None:
    """The prefix by which most of the shorter names become some of the longer ones, or None."""
    known = set(shorter)
    found = Counter(name.removesuffix(end) for name in longer for end in _ends(name) if end in known)
    ((prefix, count),) = found.most_common(1) or [("", 0)]
    return prefix if count >= ENOUGH * len(known) > 0 else None


def _ends(name: str) -> Iterator[str]:
    """Yield a dotted name's ends, without its first part, its first two, and so on."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
