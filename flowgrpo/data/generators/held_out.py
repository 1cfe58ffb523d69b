"""Which captions of an embedded task are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

TRAIN, EVAL = 1024, 256  # captions of each split
PARTS = 40  # of 256 hash values are held out

Caption = TypeVar("Caption")


def is_held_out(caption: Caption, names_unseen: Callable[[Caption], bool]) -> bool:
    """Return whether training excludes a caption: it names an unseen kind, or its hash falls into `PARTS` of 256 parts."""
    return _is_in_held_out_part(caption) or names_unseen(caption)


def split_captions(every: Sequence[Caption], names_unseen: Callable[[Caption], bool], split: str) -> tuple[str, ...]:
    """Return the captions of `train` or `eval`, always in the same order.

    A quarter of the `eval` captions name an unseen kind; the others combine known kinds in an unseen caption.
    """
    shuffled = [every[i] for i in np.random.default_rng(0).permutation(len(every))]
    if split == "train":
        return tuple(map(str, islice((c for c in shuffled if not is_held_out(c, names_unseen)), TRAIN)))
    unseen = list(islice(filter(names_unseen, shuffled), EVAL // 4))
    known = list(islice((c for c in shuffled if _is_in_held_out_part(c) and not names_unseen(c)), 3 * EVAL // 4))
    return tuple(str(c) for i in range(EVAL // 4) for c in (*known[3 * i : 3 * i + 3], unseen[i]))


def _is_in_held_out_part(caption: Caption) -> bool:
    return hashlib.blake2b(str(caption).encode(), digest_size=1).digest()[0] < PARTS
