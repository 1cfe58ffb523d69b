"""Advice on the tree of final-sample methods: chains, or groups that share their first steps and split once.

The model predicts the gain of a second from the variance spectrum and from what steps, draws and rewards cost. Let segment
k of the schedule, of n_k steps, decide the share s_k of the reward's variance. The update about k has a signal in proportion
to s_k for each draw of a noise level in k. Its noise is that of the advantage, with variance V. D draws over a part K of the
schedule have

    gain of a second ~ sum_k s_k^2 sqrt(D) / (n_k K sqrt(V x seconds of a group))    over the segments k that are trained

For chains (`awm_fast`) V is the whole variance of the reward. For groups that split at a step (`awm_late`) it is the part
that later steps decide. No draw lies above the split, and the evaluations up to it are shared. Siblings differ by the noise
of one step alone. If that decides a part r of what all later steps decide, signal and V are r times as large, and the gain
sqrt(r) times. The model is ours; docs/comparison.md compares it with measured gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowgrpo.flow.diagnostics.spectrum import VarianceShare
from flowgrpo.training.reports.doctor_checks import Check

LEAST = 0.5  # share of the variance below a split for its advice: what lies above it is never learned
MARGIN = 1.3  # least predicted gain of a tree over chains for its advice; below it the model was seen to be wrong
SIZE = 4  # samples of a group
LEVEL = 1.4  # of the noise at the split, the only noise that siblings differ by
DRAWS = 6  # draws of a sample, in both presets
FIRST, LAST = 1, 2  # steps at the beginning and the end of the schedule from which chains do not draw
STEPS = FIRST + DRAWS + LAST  # shortest schedule that the presets can draw from


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

    @property
    def overrides(self) -> str:
        """Return what to set on the command line."""
        if self.split is None:
            return "algorithm='{preset: awm_fast}'"
        tree = (
            f"tree: {{splits: [{self.split}]}}, kernel: {{level: {LEVEL:g}}}, likelihood: {{steps: [{self.split}, -2]}}"
        )
        return f"algorithm='{{preset: awm_late, {tree}}}' train.group_size={SIZE}"


def advise(
    shares: Sequence[VarianceShare], steps: int, seconds: Seconds, decided_at: Callable[[int], float]
) -> Advised:
    """Return the tree with the largest predicted gain of a second, of a schedule with `STEPS` steps or more.

    `decided_at` measures which share of the variance the noise of one step decides, if all other steps have none.
    """
    segments = [(0 if each.steps is None else each.steps[0], each) for each in shares]

    def gain(split: int | None) -> float:
        """Return the predicted gain of a second, in a unit that all splits and chains have in common."""
        trained = [each for begin, each in segments if split is None or begin >= split]
        squares = sum(max(each.share**2 - each.error**2, 0.0) / _length(each, shares) for each in trained)
        first, shared, variance = (FIRST, 0, 1.0) if split is None else (split, split + 1, _decided(trained))
        own = (steps - shared) * seconds.step + DRAWS * seconds.draw + seconds.score
        return squares / ((steps - LAST - first) * math.sqrt(variance * (shared * seconds.step + SIZE * own)))

    splits = [begin for begin, each in segments if begin and steps - LAST - begin >= DRAWS and each.share > 0]
    splits = [split for split in splits if _decided([each for begin, each in segments if begin >= split]) >= LEAST]
    best = max(splits, key=gain, default=None)
    chains = gain(None)
    if best is None or not chains or gain(best) < MARGIN * chains:
        return Advised(split=None, gain=1.0)
    later = _decided([each for begin, each in segments if begin >= best])
    predicted = gain(best) / chains * math.sqrt(min(max(decided_at(best), 0.0) / later, 1.0))
    return Advised(split=None, gain=1.0) if predicted < MARGIN else Advised(split=best, gain=predicted)


def _length(part: VarianceShare, shares: Sequence[VarianceShare]) -> int:
    """Return the number of steps of a part; the start counts as the first part does, whose noise levels are nearest."""
    first, end = part.steps or next((each.steps for each in shares if each.steps is not None), (0, 1))
    return end - first


def _decided(parts: Sequence[VarianceShare]) -> float:
    return sum(each.share for each in parts)


def check(shares: Sequence[VarianceShare], steps: int, seconds: Seconds, decided_at: Callable[[int], float]) -> Check:
    """Report the advice with the lines to set; the check always passes. For `decided_at` see `advise`."""
    advised = advise(shares, steps, seconds, decided_at)
    if advised.split is None:
        return Check("tree", True, f"chains, no split is seen to gain {MARGIN:g} times as much; {advised.overrides}")
    late = [each for each in shares if each.steps is not None and each.steps[0] >= advised.split]
    share, error = _decided(late), math.hypot(*(each.error for each in late))
    split = advised.split
    summary = (
        f"split at step {split}: later steps decide {share:.0%} ± {error:.0%} of the variance, and a second is predicted to "
        f"gain {advised.gain:.2f} times what chains gain; {advised.overrides}"
    )
    return Check("tree", True, summary)
