"""Which latents are visited?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flowgrpo.errors import InputError
from flowgrpo.flow.methods import pruning
from flowgrpo.flow.methods.credit import trunk_ends
from flowgrpo.schema.base import Choice, Positive, Strict
from flowgrpo.schema.lazy import lazy
from rewards.base import locate

if TYPE_CHECKING:
    from torch import Tensor

    from samplers import kernels as formulas
    from samplers import noise, plans, schedule
    from samplers.kernels import Kernel
    from samplers.trees import Plan, Tree
else:
    formulas = lazy("samplers.kernels")
    noise = lazy("samplers.noise")
    plans = lazy("samplers.plans")
    schedule = lazy("samplers.schedule")


class Rooted(Choice):
    """Options of every tree: `start` draws an initial noise per root or shares one in a group.

    Every tree has a `plan` of one iteration, from one kernel for each step of the schedule and the size of a group.
    """

    start: Literal["independent", "shared"] = "independent"
    last_step: Literal["ode", "sde"] = "ode"

    def roots(self, group_size: int) -> int:
        """How many roots a group has."""
        return group_size

    def pruned(self, tree: Tree, advantages: Tensor) -> Tensor | None:
        """Which edges (nodes,) stay in the update, from the advantages (nodes,) of the edge to each node; None for all."""
        return None

    def check(self, tree: Tree) -> None:
        """See that a tree grown from the plan is what the options say.

        Raises:
            InputError: it is not.
        """

    def _end(self, kernels: Sequence[Kernel]) -> int:
        if self.last_step == "sde" and kernels[-1].preserves:
            raise InputError(f"algorithm.tree.last_step: {kernels[-1].name} has no noise at the last step, take ode")
        end = len(kernels) if self.last_step == "sde" else len(kernels) - 1
        if not end:
            raise InputError(f"algorithm.tree: {self.name} needs two steps or more, or last_step: sde")
        return end


class Chain(Rooted):
    """Chains that are stochastic at every step but the last; a random `train_fraction` of those steps is trained.

    `steps` = [first, end) bounds the stochastic ones; an `end` below 0 counts from the schedule's: -2 leaves the last two
    ODE. Where a table ends just above 0, as SD3's does at 0.0089, the very last step removes none of the noise that the
    one before it drew, and it would be scored.

    DanceGRPO draws the trained steps per sample; here they are drawn per iteration and shared by all samples, so that an
    evaluation is trained whole and the rollout's log-probabilities are met exactly.
    """

    name: Literal["chain"] = "chain"
    train_fraction: float = Field(1.0, gt=0, le=1)
    steps: list[int] | None = Field(None, min_length=2, max_length=2)

    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        steps = self._stochastic(self._end(kernels), len(kernels))
        trained = schedule.random_steps(steps, self.train_fraction, noise.generator(seed, "trained steps", iteration))
        return plans.chain(kernels, steps, steps if self.train_fraction == 1 else trained)

    def _stochastic(self, end: int, num_steps: int) -> range:
        first, stop = self.steps or (0, end)
        stop = stop + num_steps if stop < 0 else stop
        if not 0 <= first < stop <= end:
            raise InputError(
                f"algorithm.tree.steps: {self.steps} are not steps among the {end} stochastic ones, take [0, {end}] or less"
            )
        return range(first, stop)


class Window(Rooted):
    """Chains that are stochastic, and trained, inside a window of `size` neighbouring steps only, and ODE outside it.

    `move: random` draws its place each iteration (Flow-GRPO-Fast); `sliding` advances it by `stride` steps each `every`
    iterations (MixGRPO). `steps` = [first, end) bounds it; by default the first half for a random window, and all
    steps but the deterministic last for a sliding one.
    """

    name: Literal["window"] = "window"
    size: int = Field(3, ge=1)
    move: Literal["random", "sliding"] = "random"
    steps: list[int] | None = Field(None, min_length=2, max_length=2)
    every: int = Field(25, ge=1)
    stride: int = Field(1, ge=1)

    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        end = self._end(kernels)
        first, stop = self.steps or (0, max(len(kernels) // 2, self.size) if self.move == "random" else end)
        if not 0 <= first <= stop - self.size <= end - self.size:
            raise InputError(
                f"algorithm.tree.size: a window of {self.size} does not fit into steps {first} to {stop} of the "
                f"{end} stochastic ones, take at most {max(1, min(stop, end) - first)}"
            )
        if self.move == "random":
            window = schedule.random_window(self.size, first, stop, noise.generator(seed, "window", iteration))
        else:
            window = schedule.sliding_window(self.size, first, stop, iteration, self.every, self.stride)
        return plans.chain(kernels, window, window)


class Brush(Rooted):
    """An ODE trunk for each seed; every step grows `branches` stochastic children, each finished by ODE (TempFlow-GRPO).

    A group of size S has S / `branches` seeds. `profile` gives each step its own number of children, 0 beyond its end:
    [6, 6, 6] branches at the first three steps only. `finish` bounds the ODE steps that finish a branch (null: all that
    remain): a coarser sample, for less.
    """

    name: Literal["brush"] = "brush"
    branches: int = Field(6, ge=2)
    profile: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    finish: int | None = Field(None, ge=1)

    def roots(self, group_size: int) -> int:
        """How many seeds a group has."""
        return _divided(group_size, self.branches, "algorithm.tree.branches children of each seed")

    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        end = self._end(kernels)
        branches = self.profile or [self.branches] * end
        if len(branches) > end or not any(branches):
            raise InputError(
                f"algorithm.tree.profile: {branches} are not the numbers of children of at most {end} stochastic steps"
            )
        return plans.brush(kernels, [*branches, *[0] * (len(kernels) - len(branches))], self.finish)


class Pruning(Strict):
    """What leaves the update of a branch tree; see `flowgrpo.flow.methods.pruning`.

    `parent_top1` keeps the best chain of each last split; `extremes` the best and the worst `fraction` of a group's chains;
    `depth` does not train a window of `size` steps, which begins before the last stochastic one (leading to depths 15
    to 18 of 20) and moves a step earlier each `every` iterations, as in the released code, until it touches the last split;
    there the code goes on to the edges of that split.
    """

    rule: Literal["parent_top1", "extremes", "depth"]
    fraction: float = Field(0.25, gt=0, lt=0.5)
    size: int = Field(4, ge=1)
    every: int = Field(30, ge=1)


class Branching(Rooted):
    """Options of branch trees: `factor` children at the steps `splits`, from a few roots.

    Without `splits` a group of size S has as many as its divisors `factor`, `factor`^2, ... allow, at most four, spread over
    the first half of the steps: 0, 3, 6, 9 of 20. `siblings` says how their noises go together: `correlated` is the paper's
    form of strength s, `hot` the released code's, s times independent noise, which breaks the marginals; `own` is plain.
    """

    factor: int = Field(2, ge=2)
    splits: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    siblings: Literal["correlated", "hot", "own"] = "correlated"
    strength: Positive = 4.0
    prune: Pruning | None = None

    def roots(self, group_size: int) -> int:
        """How many trees a group has."""
        leaves = self.factor ** self._count(group_size)
        return _divided(group_size, leaves, f"leaves of a tree with algorithm.tree.factor {self.factor}")

    def pruned(self, tree: Tree, advantages: Tensor) -> Tensor | None:
        """Which edges (nodes,) stay in the update; None for all."""
        rule = None if self.prune is None else self.prune.rule
        if rule == "parent_top1":
            return pruning.parent_top1(tree, advantages)
        return pruning.extremes(tree, advantages, self.prune.fraction) if rule == "extremes" else None

    def _count(self, group_size: int) -> int:
        if self.splits is not None:
            return len(self.splits)
        return max((n for n in range(2, 5) if group_size % self.factor**n == 0), default=1)

    def _grown(self, kernels: Sequence[Kernel], group_size: int, iteration: int, window: range | None) -> Plan:
        end = self._end(kernels)
        splits = self.splits or schedule.spread(self._count(group_size), len(kernels) // 2)
        if max(splits) >= end or len(set(splits)) < len(splits):
            where = "" if self.splits else f", which a group of {group_size} asks for unless they are given,"
            raise InputError(
                f"algorithm.tree.splits: {splits}{where} are not different steps among the {end} stochastic ones, "
                f"0 to {end - 1}"
            )
        stochastic = {*(range(end) if window is None else window), *splits}
        trained = set(stochastic)
        if self.prune is not None and max(splits) == end - 1:
            raise InputError(
                f"algorithm.tree.prune: no stochastic step follows the split at {max(splits)}, so nothing can be left out"
            )
        if self.prune is not None and self.prune.rule == "depth":
            first, size = max(splits) + 1, min(self.prune.size, end - max(splits) - 1)
            at = max(first, end - 1 - size - iteration // self.prune.every)
            trained -= set(range(at, at + size))
        spread = self.strength if self.siblings == "correlated" else None
        heat = self.strength if self.siblings == "hot" else 1.0
        return plans.branch(kernels, splits, self.factor, stochastic, trained, spread, heat)


class Branch(Branching):
    """Trees that split, stochastic at every step but the last (BranchGRPO)."""

    name: Literal["branch"] = "branch"

    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        return self._grown(kernels, group_size, iteration, None)


class BranchWindow(Branching):
    """Trees that split, stochastic at the splits and inside a window that slides as MixGRPO's (BranchGRPO-Mix)."""

    name: Literal["branch_window"] = "branch_window"
    size: int = Field(4, ge=1)
    every: int = Field(25, ge=1)
    stride: int = Field(1, ge=1)

    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        end = self._end(kernels)
        window = schedule.sliding_window(min(self.size, end), 0, end, iteration, self.every, self.stride)
        return self._grown(kernels, group_size, iteration, window)


class Twigs(Rooted):
    """Chains as in `chain`; from every state an ODE twig of `length` steps (null: all that remain) measures its value.

    `root: false` leaves out the twig of the start, for a credit that needs no value of it.
    """

    name: Literal["twigs"] = "twigs"
    length: int | None = Field(None, ge=1)
    root: bool = True

    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        return plans.twigs(kernels, range(self._end(kernels)), self.length, self.root)


class Custom(Rooted):
    """A tree of your own: `function`, as ./file.py:name or pkg.module:name, makes the plan of an iteration.

    It is called as function(kernels, **options) with one kernel for each step, the last one ODE unless `last_step` is sde,
    and returns a `samplers.trees.Plan`: (role, step) -> moves. `trajectories` says how many ends a root has.
    """

    name: Literal["custom"] = "custom"
    function: str
    options: dict[str, Any] = {}
    trajectories: int = Field(1, ge=1)

    def roots(self, group_size: int) -> int:
        """How many roots a group has."""
        return _divided(group_size, self.trajectories, "algorithm.tree.trajectories of each root")

    def check(self, tree: Tree) -> None:
        """See that every root ends in as many trajectories as it should."""
        found = len(trunk_ends(tree)) / sum(node.parent is None for node in tree.nodes)
        if found != self.trajectories:
            raise InputError(
                f"algorithm.tree.trajectories: the plan of a root has {found:g} ends, not {self.trajectories}"
            )

    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        end, function = self._end(kernels), _located(self.function, Path.cwd())
        if not callable(function):
            raise InputError(f"algorithm.tree.function: {self.function} is {type(function).__name__}, not a function")
        arguments = [*kernels[:end], *[formulas.ODE] * (len(kernels) - end)]
        try:
            inspect.signature(function).bind(arguments, **self.options)
        except TypeError as error:
            takes = ", ".join(list(inspect.signature(function).parameters)[1:]) or "none"
            raise InputError(f"algorithm.tree.options: {error}; {self.function} has the options {takes}") from None
        made = function(arguments, **self.options)
        if not callable(made):
            raise InputError(
                f"algorithm.tree.function: {self.function} returned {type(made).__name__}, not a plan (role, step) -> moves"
            )
        return made


@cache
def _located(function: str, folder: Path) -> Callable[..., Plan]:
    """What the user names; a file is found from the folder one is in, which makes the cache's key."""
    if ":" not in function:
        raise InputError(
            f"algorithm.tree.function: {function!r} names no function, write ./file.py:name or pkg.module:name"
        )
    return locate(function, f"algorithm.tree.function {function!r}")


def _divided(group_size: int, by: int, what: str) -> int:
    if group_size % by:
        below = group_size // by * by
        nearest = " or ".join(str(n) for n in (below, below + by) if n)
        raise InputError(f"train.group_size: {group_size} does not divide by the {by} {what}, take {nearest}")
    return group_size // by
