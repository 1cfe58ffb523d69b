"""Advice for final-sample methods: the steps to draw noise levels from, and chains or groups that split once.

The model predicts the gain of a second from the variance spectrum and from what steps, draws and rewards cost. Let segment
k of the schedule, of n_k steps, decide the share s_k of the reward's variance. The update about k has a signal in proportion
to s_k for each draw of a noise level in k. Its noise is that of the advantage, with variance V. D draws over a part K of the
schedule have

    gain of a second ~ sum_k s_k^2 sqrt(D) / (n_k K sqrt(V x seconds of a group))    over the segments k that are trained

For chains (`awm_fast`) V is the whole variance of the reward. For groups that split at a step (`awm_late`) it is the part
that later steps decide. No draw lies above the split, and the evaluations up to it are shared. Siblings differ by the noise
of one step alone. If that decides a part r of what all later steps decide, signal and V are r times as large, and the gain
sqrt(r) times. The model is ours; docs/research/comparison.md compares it with measured gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowgrpo.flow.diagnostics.spectrum import VarianceShare
from flowgrpo.training.reports.doctor_checks import Check

LEAST = 0.5  # least share of the variance that trained steps decide: what lies above them is never learned
OF_DRAWS = 1.1  # least predicted gain of late draws over the preset's own for their advice
OF_SPLITS = 1.3  # the same of a split over the best chains; below it the model was seen to be wrong
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
    """The first step to draw from (None: the preset's own), whether groups split there, and the predicted gain of a second.

    The gain is a multiple of that of chains with the preset's own draws.
    """

    first: int | None
    splits: bool
    gain: float

    @property
    def overrides(self) -> str:
        """Return what to set on the command line."""
        if self.first is None:
            return "algorithm='{preset: awm_fast}'"
        draws = f"likelihood: {{steps: [{self.first}, -{LAST}]}}"
        if not self.splits:
            return f"algorithm='{{preset: awm_fast, {draws}}}'"
        tree = f"tree: {{splits: [{self.first}]}}, kernel: {{level: {LEVEL:g}}}"
        return f"algorithm='{{preset: awm_late, {tree}, {draws}}}' train.group_size={SIZE}"


def advise(
    shares: Sequence[VarianceShare], steps: int, seconds: Seconds, decided_at: Callable[[int], float]
) -> Advised:
    """Return what has the largest predicted gain of a second, of a schedule with `STEPS` steps or more.

    `decided_at` measures which share of the variance the noise of one step decides, if all other steps have none.
    """

    def gain(first: int | None, splits: bool = False) -> float:
        """Return the predicted gain of a second, in a unit that is common to all."""
        trained, begin = _from(first, shares), FIRST if first is None else first
        squares = sum(
            max(each.share * abs(each.share) - each.error**2, 0.0) / _length(each, shares) for each in trained
        )
        shared, variance = (begin + 1, _decided(trained)) if splits else (0, 1.0)
        own = (steps - shared) * seconds.step + DRAWS * seconds.draw + seconds.score
        return squares / ((steps - LAST - begin) * math.sqrt(variance * (shared * seconds.step + SIZE * own)))

    begins = [each.steps[0] for each in shares if each.steps is not None and each.steps[0] > 0 and each.share > 0]
    begins = [begin for begin in begins if begin <= steps - LAST - DRAWS and _decided(_from(begin, shares)) >= LEAST]
    usual = gain(None)
    latest = max(begins, key=gain, default=None)
    if latest is None or not usual:
        return Advised(first=None, splits=False, gain=1.0)
    first = latest if gain(latest) >= OF_DRAWS * usual else None
    chains = Advised(first=first, splits=False, gain=gain(first) / usual)
    split = max(begins, key=lambda begin: gain(begin, True))
    if gain(split, True) < OF_SPLITS * gain(first):
        return chains
    part = min(max(decided_at(split), 0.0) / _decided(_from(split, shares)), 1.0)
    tree = Advised(first=split, splits=True, gain=gain(split, True) / usual * math.sqrt(part))
    return tree if tree.gain >= OF_SPLITS * chains.gain else chains


def _from(first: int | None, shares: Sequence[VarianceShare]) -> list[VarianceShare]:
    """Return the shares of a step and those after it; None: all."""
    return [each for each in shares if first is None or (each.steps is not None and each.steps[0] >= first)]


def _length(part: VarianceShare, shares: Sequence[VarianceShare]) -> int:
    """Return the number of steps of a part; the start counts as the first part does, whose noise levels are nearest."""
    first, end = part.steps or next((each.steps for each in shares if each.steps is not None), (0, 1))
    return end - first


def _decided(parts: Sequence[VarianceShare]) -> float:
    return sum(each.share for each in parts)


def check(shares: Sequence[VarianceShare], steps: int, seconds: Seconds, decided_at: Callable[[int], float]) -> Check:
    """Report the advice with the lines to set; the check always passes. For `decided_at` see `advise`."""
    advised = advise(shares, steps, seconds, decided_at)
    what, reasons = "split" if advised.splits else "chains", []
    if advised.first is not None:
        what += f" at step {advised.first}" if advised.splits else f" with draws from step {advised.first} on"
        reasons.append(
            f"later steps decide {_decided(_from(advised.first, shares)):.0%} of the variance, and the predicted gain "
            f"of a second is {advised.gain:.2f} times that of chains with the usual draws"
        )
    if not advised.splits:
        reasons.append(f"a split is not predicted to learn {OF_SPLITS:g} times as fast")
    return Check("tree", True, f"take {what}: {'; '.join(reasons)}; to take them: {advised.overrides}")
