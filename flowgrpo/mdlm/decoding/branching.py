"""Trees of a decode: answers that share the steps before a split."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.rules.commit_rules import Committer

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.decode import Decoder

Place = tuple[int, int]  # before a step of a decode: the number of its block, and the steps taken in this block
START: Place = (0, 0)
END: Place = (sys.maxsize, 0)


@dataclass(frozen=True)
class Branching:
    """Trees of `leaves` rows: a branch splits into `factor` branches, `depth` times, which go on with own seeds.

    The first row of a branch leads it: until the branch splits, only this row is decoded, with its own seed.

    With `entropy` a branch waits for a place where the mean entropy of the block's masked tokens is `entropy` or more, as
    long as the later places are enough for its splits. This takes one evaluation of the branch at each place. It does not
    look at what is drawn later, so that the expected gradient stays that of the mean reward.
    """

    factor: int
    places: tuple[Place, ...]  # ascending
    depth: int  # splits on the way to every leaf, at most the number of places
    entropy: float | None = None  # in nats; None: a branch splits at the first places

    @property
    def leaves(self) -> int:
        """Leaves of a tree."""
        return self.factor**self.depth


NO_BRANCHES = Branching(1, (), 0)


def place_splits(decoder: Decoder, shares: Sequence[float], place: str) -> tuple[Place, ...]:
    """Return the places at some shares of a decoder's steps, or of its blocks if it is not paced.

    Raises InputError, naming `place`, if two shares are the same step or block, or one is the first.
    """
    frame, blocks, committer = decoder.frame, len(decoder.region.ends), decoder.committer
    assert isinstance(committer, Committer), "every committer of the tables is a Committer"
    of_block = committer.block_steps(frame)
    parts, unit = (blocks, "blocks") if of_block is None else (frame.steps, "steps")
    at = [round(share * parts) for share in shares]
    if at != sorted({*at}) or not at[0] > 0 or at[-1] >= parts:
        nearest = f", take {' or '.join(f'{k / parts:g}' for k in sorted({1, parts // 2, parts - 1}))}" * (parts > 1)
        raise InputError(f"{place}: {list(shares)} are not ascending places inside a decode of {parts} {unit}{nearest}")
    if of_block is None:
        return tuple((number, 0) for number in at)
    return tuple(divmod(number, of_block) for number in at)
