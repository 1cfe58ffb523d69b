"""Advice on the tree of final-sample methods: chains, or groups that share their first steps and split once.

The model predicts the gain of a second from the variance spectrum and from what steps, draws and rewards cost. Let segment
k of the schedule, or the start, decide the share s_k of the reward's variance. The update about k has a signal in proportion
to s_k, and noise in proportion to the variance of the advantage. Over the segments that a method trains:

    gain of a second ~ sqrt(sum_k s_k^2 / (variance of the advantage x seconds of a group))

For chains (`awm_fast`) the advantage has the whole variance of the reward. For groups that split at a step (`awm_late`) it
has the part that later steps decide. No draw lies above the split, and the steps up to it are taken once a group. They
train only what later steps decide, so a split is advised where that is at least `LEAST` of the variance. The model is ours;
docs/methods.md compares it with measured gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.flow.diagnostics.spectrum import VarianceShare
from flowgrpo.training.reports.doctor_checks import Check

LEAST = 0.5  # share of the variance below an advised split
MARGIN = 1.1  # least predicted gain of a tree over chains that is worth its advice
LEAVES = 4  # samples of a tree of awm_late
DRAWS = 6  # draws of a sample of awm_fast; those of awm_late are in proportion to the steps that it trains


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one sample: a step in a rollout, a draw in an update, and its decoding with all rewards."""

    step: float
    draw: float
    score: float


@dataclass(frozen=True, kw_only=True)
class Advised:
    """A tree: the step at which a group splits (None: chains), and its predicted gain of a second over that of chains."""

    split: int | None
    gain: float


def advise(shares: Sequence[VarianceShare], steps: int, seconds: Seconds) -> Advised:
    """Return the tree with the largest predicted gain of a second, of a schedule with so many steps."""
    segments = [(0 if each.steps is None else each.steps[0], max(each.share, 0.0)) for each in shares]

    def below(split: int) -> float:
        return sum(share for begin, share in segments if begin >= split)

    def gain(split: int | None) -> float:
        """Return the predicted gain of a second, in a unit that all splits and chains have in common."""
        squares = sum(share**2 for begin, share in segments if split is None or begin >= split)
        variance, shared, span = (1.0, 0, steps) if split is None else (below(split), split + 1, steps - split)
        draws = max(1, round(DRAWS * span / steps))
        own = (steps - shared) * seconds.step + draws * seconds.draw + seconds.score
        return math.sqrt(squares / (variance * (shared * seconds.step + LEAVES * own)))

    splits = [begin for begin, _ in segments if begin and below(begin) >= LEAST]
    best = max(splits, key=gain, default=None)
    if best is None or gain(best) < MARGIN * gain(None):
        return Advised(split=None, gain=1.0)
    return Advised(split=best, gain=gain(best) / gain(None))


def check(shares: Sequence[VarianceShare], steps: int, seconds: Seconds) -> Check:
    """Report the advice with the lines to set; the check always passes."""
    advised = advise(shares, steps, seconds)
    if advised.split is None:
        return Check("tree", True, "chains: no late part of the steps decides enough; algorithm.preset=awm_fast")
    late = [each for each in shares if each.steps is not None and each.steps[0] >= advised.split]
    share, error = sum(each.share for each in late), math.hypot(*(each.error for each in late))
    split = advised.split
    summary = (
        f"split at step {split}: later steps decide {share:.0%} ± {error:.0%} of the variance, and a second is predicted to "
        f"gain {advised.gain:.2f} times what chains gain; algorithm.preset=awm_late algorithm.tree.splits=[{split}] "
        f"algorithm.likelihood.steps=[{split},-2]"
    )
    return Check("tree", True, summary)
