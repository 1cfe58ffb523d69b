"""Trees of a decode: answers that share the steps before a split."""

from __future__ import annotations

import sys
from dataclasses import dataclass

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
