"""Hints for failed groups: they are grown again from noised good samples, the less noised the more often they failed.

The rule is ours. It carries over to flows what others do with texts: DR-PO (arXiv 2404.08495) starts rollouts from states
of good data; Scaf-GRPO (2510.19807), GHPO (2507.10628) and SAGE (2602.03143) give hints that grow where a group fails and
fade where it succeeds. A noised start is that of SDEdit (2108.01073).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice, Count, Rate
from flowgrpo.training.advantages.past_baselines import PastBaseline
from flowgrpo.training.prompts.failed_groups import check_success

if TYPE_CHECKING:
    from samplers.kernels import State

TREES = ("chain", "window", "brush", "twigs")
SOURCES = {"search": ("search", "teacher"), "width": ("search", "teacher"), "column": ("data",)}  # that read an option


class NoHints(Choice):
    """All samples start from noise."""

    name: Literal["none"] = "none"


class Noised(Choice):
    """Grow a share of a failed group again from noised good samples of its prompt; new trees replace failed ones.

    A group fails if no sample reaches `success`. A new tree starts at x = (1 - sigma) good + sigma noise and has only the
    steps below sigma. So the gradient is exact for this start, and reaches the plain objective only as sigma tends to
    1. New samples are compared with each other, and failed ones with each other. The noise is fresh, since that of a
    failed group is known to fail.
    """

    name: Literal["noised"] = "noised"
    source: Literal["winner", "data", "search", "teacher"] = "winner"
    """Good samples. winner: those of this run that succeeded without a hint; data: pictures in a column of the prompts;
    search: as winner, and successful candidates that the policy samples of a failed prompt without a winner; teacher: as
    search, but model.teacher samples the candidates."""
    search: Literal["best-of-n", "beam"] = "best-of-n"
    """How candidates are sampled. best-of-n: by ODE; beam: by stochastic steps, with comparisons by the run's rewards."""
    width: Count = 8
    """Candidates of a prompt; it gets them at most once in an iteration."""
    column: str = "picture"
    """Column of the prompts with a picture file, or a list of some, for the source data."""
    reward: str | None = None
    """Name of the reward that decides whether a sample succeeds; null: the only reward."""
    success: float = 1.0
    """A sample succeeds if that reward is at least this."""
    replace: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest share of a group's roots that is replaced."""
    ladder: Annotated[list[Rate], Field(min_length=2, max_length=2)] = [0.2, 0.9]
    """Least and largest sigma of a start. Each prompt has its own in the schedule: the largest whose samples succeed."""
    winners: Count = 4
    """Most good samples that the run remembers of a prompt; each root draws one."""
    memory: Count = 256
    """Most good samples that the run remembers of all prompts; those of the prompt that won longest ago go first."""

    @model_validator(mode="after")
    def _ordered(self) -> Noised:
        low, high = self.ladder
        if low > high:
            raise InputError(f"algorithm.hints.ladder: {low} is above {high}, write the least first")
        for key, sources in SOURCES.items():
            if self.source not in sources and getattr(self, key) != type(self).model_fields[key].default:
                raise InputError(
                    f"algorithm.hints.{key}: source {self.source} does not read it, take source {' or '.join(sources)}"
                )
        return self


def noised(winner: State, sigma: float, noise: State) -> State:
    """Return (1 - sigma) winner + sigma noise, tensors of the shapes and dtypes of `noise`; at sigma 1 the noise itself."""
    pairs = zip(winner, noise, strict=True)
    return tuple(((1 - sigma) * x.to(xi.device).float() + sigma * xi.float()).to(xi.dtype) for x, xi in pairs)


def find_rungs(sigmas: Sequence[float], bounds: Sequence[float], last: int) -> list[int]:
    """Return the rungs of the ladder: the steps of the schedule `sigmas` at which a start is, weakest hint first.

    Their sigmas lie within `bounds` (least, largest) and below the first; none is after step `last`.
    """
    low, high = bounds
    return [step for step in range(1, last + 1) if low <= sigmas[step] <= high]


Bounds = tuple[int, int]  # rungs of a prompt: the strongest that is too weak, and the weakest that helps


def start_ladder(rungs: int) -> Bounds:
    """Return the bounds of a prompt without a history: no rung is known to be too weak or to help."""
    return -1, rungs


def choose_rung(bounds: Bounds, rungs: int) -> int:
    """Return the rung of the next start, halfway between the bounds; 0 is the weakest hint of `rungs`."""
    return min(max(sum(bounds) // 2, 0), rungs - 1)


def climb(bounds: Bounds, rung: int, *, helped: bool, rungs: int) -> Bounds:
    """Return a prompt's bounds after a visit with hints of `rung`, of which some sample succeeded or none did.

    Visits bisect the ladder. Once the bounds meet, each success makes the next hint one rung weaker, so that the hint
    fades, and each failure makes it one rung stronger.
    """
    weak, strong = bounds
    if helped:
        strong = min(strong, rung)
        return (weak if weak < strong - 1 else max(strong - 2, -1)), strong
    weak = max(weak, rung)
    return weak, (strong if strong > weak + 1 else min(weak + 2, rungs))


def check(algorithm: Any) -> None:
    """Raise InputError if a choice of `algorithm` does not go with hints."""
    if algorithm.hints.name == "none":
        return
    if algorithm.likelihood.name != "trajectory":
        raise InputError(
            f"algorithm.hints: a noised start leaves only later steps to train, but {algorithm.likelihood.name} "
            "trains on final samples; take none, or algorithm.likelihood=trajectory"
        )
    if algorithm.tree.name not in TREES:
        raise InputError(
            f"algorithm.hints: hints replace a share of a group's roots, but {algorithm.tree.name} has few roots or "
            f"changes; take none, or algorithm.tree={', '.join(TREES[:-1])} or {TREES[-1]}"
        )
    if algorithm.hints.source == "teacher" and algorithm.reference != "teacher":
        raise InputError(
            "algorithm.hints.source: a teacher takes the place of the reference, but the reference is "
            f"{algorithm.reference}; take algorithm.objective.kl.reference=teacher, or beta 0"
        )
    if getattr(algorithm.tree, "stop", None) is not None:
        raise InputError("algorithm.tree.stop: hints follow successes, but a stopped chain has no reward; take null")
    if isinstance(algorithm.baseline, PastBaseline):
        raise InputError(
            f"algorithm.hints: {algorithm.baseline.name} compares with earlier rewards, which had no hints; take none, or "
            "algorithm.baseline=group_mean"
        )


def check_run(config: Any) -> None:
    """Raise InputError if a setting of the run or of training does not go with hints."""
    hints, run, train = config.algorithm.hints, config.run, config.train
    if hints.name == "none":
        return
    check_success(hints.reward, config.reward_names)
    roots = config.algorithm.tree.roots(train.group_size)
    least = 1 if config.algorithm.credit.name == "siblings" else 2  # roots that are compared
    if int(hints.replace * roots) < least:
        raise InputError(
            f"algorithm.hints.replace: {hints.replace} of {roots} roots is less than {least}, take {least / roots:.3g}"
            if roots >= least
            else f"algorithm.hints: a group has one root, and {least} are compared; take a larger train.group_size"
        )
    settings = {
        "train.draft": (train.draft is not None, "null", "it chooses the starts of a group"),
        "run.engine": (run.engine is not None, "null", "an engine starts from noise alone"),
        "run.staleness": (run.staleness > 0, "0", "hints follow the last iteration's rewards"),
        "run.generators": (run.generators > 0, "0", "hints follow the last iteration's rewards"),
        "run.sharding": (run.sharding != "none", "none", "processes call the model unequally often with hints"),
    }
    for key, (given, allowed, reason) in settings.items():
        if given:
            raise InputError(f"{key}: {reason}; take {allowed}, or algorithm.hints=none")


def check_policy(config: Any, policy: Any) -> None:
    """Raise InputError if the policy's schedule or states do not go with noised starts."""
    hints = config.algorithm.hints
    if hints.name == "none":
        return
    if policy.pins or abs(policy.sigmas[0] - 1) > 1e-3:
        raise InputError("algorithm.hints: this pipeline does not start from noise alone; take none")
    if not find_rungs(policy.sigmas, hints.ladder, len(policy.sigmas) - 2):
        within = ", ".join(f"{sigma:.3g}" for sigma in policy.sigmas[1:-1]) or "none"
        raise InputError(
            f"algorithm.hints.ladder: no sigma of the schedule lies in {hints.ladder}, there are {within} between noise and "
            "data"
        )
