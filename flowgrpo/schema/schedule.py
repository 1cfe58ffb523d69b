"""Schedules of training, choices of prompts and of trained units, and intervals of the steps (`first:end`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Strict

FORM = "write first:end, fractions of the steps from the start, such as 0:0.6"


class Schedule(Strict):
    """Learning rate schedule: a factor of the learning rate for each optimizer step."""

    name: Literal["constant", "linear", "cosine", "polynomial", "cosine_with_restarts"] = "constant"
    """The factor after the warm-up: constant; linear; polynomial, a power of the remaining fraction of the steps;
    cosine, half a wave; cosine_with_restarts, several half waves."""
    warmup: int = Field(0, ge=0)
    """Optimizer steps over which the factor rises linearly from 0."""
    floor: float = Field(0.0, ge=0, lt=1)
    """The factor at the end of the run."""
    power: float = Field(1.0, gt=0)
    """Exponent of polynomial."""
    cycles: int = Field(1, ge=1)
    """Number of half waves of cosine_with_restarts."""

    @model_validator(mode="after")
    def _used(self) -> Schedule:
        for key, name in (("power", "polynomial"), ("cycles", "cosine_with_restarts")):
            if getattr(self, key) != 1 and self.name != name:
                raise InputError(f"train.schedule.{key}: {self.name} has none, take train.schedule.name={name}")
        return self

    def factor(self, step: int, total: int) -> float:
        """Return the factor at optimizer step `step` (from 0) of `total`, as transformers and diffusers define it."""
        if step < self.warmup:
            return step / self.warmup
        done = (step - self.warmup) / max(1, total - self.warmup)
        fallen = {
            "constant": 1.0,
            "linear": 1 - done,
            "polynomial": (1 - done) ** self.power,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "cosine_with_restarts": (1 + math.cos(math.pi * (self.cycles * done % 1))) / 2,
        }[self.name]
        return self.floor + (1 - self.floor) * fallen


class HalfLife(Strict):
    """When a reward of an earlier iteration counts half. A number in its place sets `after`."""

    by: Literal["iterations", "log_ratio"] = "iterations"
    """iterations: rewards age by iterations; log_ratio: by how far the policy moved, the sum of
    policy/mean_abs_log_ratio over iterations (after SPO)."""
    after: float = Field(8.0, gt=0)
    """The age, in iterations or in log ratios, after which a reward counts half."""
    keep: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """Bounds of the factor on a prompt's earlier rewards at its next visit; SPO's code has [0.875, 0.96]."""

    @model_validator(mode="after")
    def _meant(self) -> HalfLife:
        if self.by == "log_ratio" and "after" not in self.model_fields_set:
            raise InputError(
                "train.half_life.after: log ratios have no typical size, so give the sum that halves a reward; for "
                "about 8 iterations take 8 times the policy/mean_abs_log_ratio of an earlier run"
            )
        if self.keep[0] > self.keep[1]:
            raise InputError(f"train.half_life.keep: {self.keep} are not in ascending order; take {sorted(self.keep)}")
        return self

    def check(self, hindrance: str | None, moves: bool) -> None:
        """Raise InputError if rewards age by log ratios that are not measured.

        Args:
            hindrance: why they are not, see `AlgorithmSection.ratio_hindrance`; None if they are.
            moves: whether any optimizer step of an iteration starts from another policy than the one that sampled.
        """
        if hindrance is None and not moves:
            hindrance = "in one optimizer step an iteration all ratios are 1, take train.updates=2"
        if self.by == "log_ratio" and hindrance is not None:
            raise InputError(
                f"train.half_life.by: log_ratio needs the ratio to the policy that sampled, but {hindrance} or "
                "iterations"
            )

    def kept(self, age: float) -> float:
        """Return the factor of rewards that are `age` old, in iterations or in log ratios."""
        return min(max(0.5 ** (age / self.after), self.keep[0]), self.keep[1])


class Select(Strict):
    """Selection of the credit units to train on."""

    rule: Literal["extremes", "max_variance"] = "extremes"
    """extremes: the best and the worst of a set; max_variance: the units with the largest variance (PODS)."""
    fraction: float = Field(0.5, gt=0, le=1)
    """Fraction of the compared units that is trained on."""
    end: float | None = Field(None, gt=0, le=1)
    """Fraction in the last iteration, to which it moves linearly; null: as in the first."""
    across: Literal["sets", "batch"] = "sets"
    """sets: within each set of compared units, by their rewards; batch: among all units of the iteration, by their
    advantages (D3S), which favours groups of large advantages."""
    statistics: Literal["kept", "all"] | None = None
    """Units that give the means and standard deviations of the advantages: kept or all; null: kept within sets, all
    across the batch."""

    @model_validator(mode="after")
    def _compared_first(self) -> Select:
        if self.across == "batch" and self.statistics == "kept":
            raise InputError(
                "train.select.statistics: a selection by advantages needs the statistics of all units; take all"
            )
        return self

    @property
    def compares_kept(self) -> bool:
        """Return whether advantages compare the kept units only."""
        return self.statistics == "kept" or (self.statistics is None and self.across == "sets")

    def share(self, done: float) -> float:
        """Return the fraction that is trained on when the fraction `done` of the iterations is done."""
        return self.fraction if self.end is None else self.fraction + (self.end - self.fraction) * done


class SecondStage(Strict):
    """Further samples for hard groups, once the first rewards of an iteration are known (DARS, arXiv 2508.13755)."""

    form: Literal["equal", "hardness"] = "equal"
    """Target for the sum of |A| in a group of N samples with mean reward p < 1/2; with rewards 0 and 1 the sum is 2 p (1
    - p) N. equal: N / 2, the sum at p = 1/2; hardness: (1 - p) N, more for harder groups."""
    most: float = Field(4.0, gt=1, le=1e6)
    """Largest group after both stages, as a multiple of its first size; DARS has 4, and 8 for hardness."""

    def further(self, p: float, number: int) -> int:
        """Return how many samples a group needs after `number` samples of mean reward `p`, without the limit `most`.

        For rewards of 0 and 1 the sizes of N advantages reward - p sum to N s, with s = 2 p (1 - p). After n further
        samples of the same p the sum is (N + n) s. The least n is returned by which it is what `form` says, as in the
        paper's code: ceil(target / s - N). A p below 1 / (2 N) counts as that, as 0 does in the code. A group with p of
        1/2 or more needs none.
        """
        p = max(p, 0.5 / number)
        if p >= 0.5:
            return 0
        target = {"equal": 0.5, "hardness": 1 - p}[self.form] * number
        return math.ceil(target / (2 * p * (1 - p)) - number - 1e-9)  # more than rounding adds to a whole number

    def largest(self, first: int) -> int:
        """Return the largest size of a group after both stages, whose first size is `first`."""
        return math.floor(self.most * first + 1e-9)


class Pick(Strict):
    """Options of an iteration's choice of prompts, group sizes and loss weights.

    The choice uses p, each prompt's mean reward so far, mapped from [`worst`, `best`] to [0, 1]; `budget: root_variance`
    uses the variance of the rewards as they are. Both are discounted; see `train.half_life`.
    """

    by: Literal["shuffle", "variance"] = "shuffle"
    """shuffle: pass after pass over all prompts; variance: the prompts with the largest expected variance of rewards
    (VADE)."""
    budget: Literal["equal", "knapsack", "root_variance"] = "equal"
    """equal: groups of one size; knapsack: samples move to prompts where they teach more (Knapsack RL); root_variance: a
    prompt's samples are proportional to the standard deviation of its rewards (Rollout-GDRO)."""
    least: float = Field(0.5, gt=0, le=1)
    """Smallest group where samples move, as a multiple of the equal size."""
    most: float = Field(2.0, ge=1)
    """Largest group where samples move, as a multiple of the equal size."""
    robust: float = Field(0.0, ge=0)
    """Above 0, groups weigh softmax(robust x (1 - p)), so that prompts that are rarely solved count more
    (Prompt-GDRO)."""
    worst: float = 0.0
    """The reward that counts as 0."""
    best: float = 1.0
    """The reward that counts as 1."""
    second_stage: SecondStage | None = None
    """Give hard groups further samples after their first rewards (DARS); a word is its form, null: none."""

    @field_validator("second_stage", mode="before")
    @classmethod
    def _word(cls, written: Any) -> Any:
        if written is not None and not isinstance(written, str | dict | SecondStage):
            raise InputError(f"prompts.pick.second_stage: {written!r} is no form, take equal, hardness or null")
        return {"form": written} if isinstance(written, str) else written

    @model_validator(mode="after")
    def _ordered(self) -> Pick:
        if self.best <= self.worst:
            raise InputError(f"prompts.pick.best: {self.best} is not above prompts.pick.worst = {self.worst}")
        return self


def read_part(written: Any, key: str = "eval.adapter_steps") -> Any:
    """Parse `first:end`, or a list, as [first, end]; raise InputError, naming `key`, unless 0 <= first <= end <= 1."""
    if written is None:
        return None
    ends = written.split(":") if isinstance(written, str) else written
    if not isinstance(ends, list) or len(ends) != 2 or any(isinstance(end, bool) for end in ends):
        raise InputError(f"{key}: {written!r} is no part of the schedule, {FORM}")
    try:
        first, end = map(float, ends)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{key}: {written!r} is no part of the schedule, {FORM}") from None
    if not 0 <= first <= end <= 1:
        raise InputError(f"{key}: {written!r} does not lie between 0 and 1 in this order, {FORM}")
    return [first, end]


def part_text(part: Sequence[float]) -> str:
    """Format an interval (first, end) as text: 0:0.6."""
    return ":".join(repr(float(end)).removesuffix(".0") for end in part)
