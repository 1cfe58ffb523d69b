"""Options of the trees, the shapes of a rollout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.trees import pruning
from flowgrpo.flow.methods.trees.stopping import Stop
from flowgrpo.schema.base import Choice, Positive, Strict
from flowgrpo.schema.imports.heavy import Tensor
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.distributed.minibatches import count_roots
from flowgrpo.training.weights.low_precision_copies import Copied

if TYPE_CHECKING:
    from samplers import noise, plans, schedule
    from samplers.kernels import Kernel
    from samplers.trees import Plan, Tree
else:
    noise = lazy("samplers.noise")
    plans = lazy("samplers.plans")
    schedule = lazy("samplers.schedule")

CHECK = 10  # default iterations between two measurements


class Finish(Strict):
    """How the ODE steps at the end of a branch or twig are taken; a number alone sets `steps`.

    These steps only lead to a reward. No gradient and no ratio passes there, so they may be cheap: their error only
    adds noise or bias to the reward. A run measures how well the order of siblings is kept (`finish/rank_agreement`)
    and how far rewards move (`finish/reward_drift`); see `flowgrpo.flow.rollouts.cheap_finishes`.
    """

    steps: int | None = Field(None, ge=1)
    """Largest number of ODE steps, spread evenly over the remaining schedule; null: all the remaining steps."""
    dtype: Copied | None = None
    """Precision of a copy of the linear layers that takes these steps: bfloat16, or a value of train.draft.precision,
    with which the copy is shared; null: the network itself takes them."""
    check: int | None = Field(None, ge=0)
    """Iterations between two checks, from the first iteration on: the first group is also finished exactly, and the
    rewards are compared. 0: never; null: 10 with a dtype, 0 without."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, written: Any) -> Any:
        return {"steps": written} if isinstance(written, int) and not isinstance(written, bool) else written

    @property
    def cheap(self) -> bool:
        """Return whether a copy in low precision takes the steps."""
        return self.dtype is not None

    @property
    def every(self) -> int:
        """Return the iterations between two checks; 0 for never."""
        if self.check is None:
            return CHECK if self.cheap else 0
        return self.check


class Rooted(Choice):
    """Options of every tree."""

    adapts: ClassVar[bool] = False
    """Whether the shape of the tree changes during a run; see `flowgrpo.flow.rollouts.adaptive_tree`."""
    start: Literal["independent", "shared"] = "independent"
    """independent: one initial noise for each root; shared: one initial noise for a group."""
    last_step: Literal["ode", "sde"] = "ode"
    """Whether the last step is ODE or stochastic."""

    @abstractmethod
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """Return the plan of one iteration from the kernel of each step; `seed` and `iteration` fix all random draws."""

    def roots(self, group_size: int) -> int:
        """Return the number of roots of a group; raise InputError if a tree's samples do not divide `group_size`."""
        return group_size

    def kept_edges(self, tree: Tree, advantages: Tensor) -> Tensor | None:
        """Return a mask (nodes,) of the edges that stay in the update, from advantages (nodes,); None: all stay."""
        return None

    @property
    def keeps_groups_whole(self) -> str | None:
        """Return, as text, the setting of the tree that needs a whole group on one process; None without such a setting."""
        return None

    @property
    def exact(self) -> Rooted:
        """Return the same tree with exact finishes: all the remaining steps, by the network itself."""
        return self.model_copy(update={"finish": None}) if getattr(self, "finish", None) is not None else self

    def check(self, tree: Tree) -> None:
        """Raise InputError if a tree grown from the plan contradicts the options."""

    def _end(self, kernels: Sequence[Kernel]) -> int:
        if self.last_step == "sde" and kernels[-1].preserves:
            raise InputError(f"algorithm.tree.last_step: {kernels[-1].name} has no noise at the last step, take ode")
        end = len(kernels) if self.last_step == "sde" else len(kernels) - 1
        if not end:
            raise InputError(f"algorithm.tree: {self.name} needs two steps or more, or last_step: sde")
        return end


class Unbranched(Rooted):
    """Options of trees without splits."""

    stop: Stop | None = None
    """Stop chains before their last step, by foretold rewards and without bias; null: none stop."""

    @property
    @override
    def keeps_groups_whole(self) -> str | None:
        return None if self.stop is None else "algorithm.tree.stop"

    @override
    def _end(self, kernels: Sequence[Kernel]) -> int:
        if self.stop is not None and self.stop.step >= len(kernels):
            raise InputError(
                f"algorithm.tree.stop.step: {self.stop.step} leaves nothing to save of {len(kernels)} steps, take at most "
                f"{len(kernels) - 1}"
            )
        return super()._end(kernels)


class Chain(Unbranched):
    """Chains that are stochastic at every step but the last.

    `steps` [0, -2] makes the last two steps ODE. If a schedule ends just above 0, as SD3's at 0.0089, the very last
    step removes almost none of the noise of a stochastic step before it. DanceGRPO draws the trained steps for each
    sample; here all samples of an iteration share them, so that the update replays whole evaluations of the rollout.
    Formula: `samplers.plans.chain`.
    """

    name: Literal["chain"] = "chain"
    train_fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of the stochastic steps that is trained; the trained ones are drawn in each iteration."""
    steps: list[int] | None = Field(None, min_length=2, max_length=2)
    """[first, end) of the stochastic steps; a negative end counts from the schedule's end. null: all but the last."""

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        end, num_steps = self._end(kernels), len(kernels)
        first, stop = self.steps or (0, end)
        stop = stop + num_steps if stop < 0 else stop
        _check_steps(self.steps, first, stop, end)
        steps = range(first, stop)
        count = max(1, int(len(steps) * self.train_fraction))
        trained = schedule.random_steps(steps, count, noise.generator(seed, "trained steps", iteration))
        return plans.chain(kernels, steps, steps if self.train_fraction == 1 else trained)


class Window(Unbranched):
    """Chains that are stochastic, and trained, only inside a window of steps (MixGRPO, arXiv 2507.21802)."""

    name: Literal["window"] = "window"
    size: int = Field(3, ge=1)
    """Number of steps in the window."""
    move: Literal["random", "scattered", "sliding"] = "random"
    """random: consecutive steps, drawn in each iteration (Flow-GRPO-Fast); scattered: single steps drawn without
    repeats (Flow-DPPO's code); sliding: consecutive steps, moved by `stride` after each `every` iterations
    (MixGRPO)."""
    steps: list[int] | None = Field(None, min_length=2, max_length=2)
    """[first, end) that bounds the window; null: all but the last step if sliding, else the first half of the steps."""
    every: int = Field(25, ge=1)
    """Iterations between two moves of a sliding window."""
    stride: int = Field(1, ge=1)
    """Steps by which a sliding window moves."""

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        end = self._end(kernels)
        first, stop = self.steps or (0, end if self.move == "sliding" else max(len(kernels) // 2, self.size))
        if self.steps is not None:
            _check_steps(self.steps, first, stop, end)
        if not first <= stop - self.size <= end - self.size:
            raise InputError(
                f"algorithm.tree.size: a window of {self.size} does not fit into steps {first} to {stop} of the "
                f"{end} stochastic ones, take at most {max(1, min(stop, end) - first)}"
            )
        rng = noise.generator(seed, "window", iteration)
        if self.move == "random":
            window = schedule.random_window(self.size, first, stop, rng)
        elif self.move == "scattered":
            window = schedule.random_steps(range(first, stop), self.size, rng)
        else:
            window = schedule.sliding_window(self.size, first, stop, iteration, self.every, self.stride)
        return plans.chain(kernels, window, window)


class Brush(Rooted):
    """An ODE trunk for each seed, with `branches` stochastic children at every step, finished by ODE (TempFlow-GRPO).

    A group of size S has S / `branches` seeds. Formula: `samplers.plans.brush`.
    """

    name: Literal["brush"] = "brush"
    branches: int = Field(6, ge=2)
    """Children of each step of a seed's ODE trunk."""
    profile: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Number of children of each step, 0 for the steps after the list's end; null: branches at each step."""
    finish: Finish | None = None
    """How ODE steps finish a branch: a number bounds these steps, a map sets more; null: all the remaining steps."""

    @property
    def first_split(self) -> int:
        """Return the first step that branches leave."""
        return next((step for step, count in enumerate(self.profile or [1]) if count), 0)

    @override
    def roots(self, group_size: int) -> int:
        return count_roots(group_size, self.branches, "algorithm.tree.branches children of each seed")

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        end = self._end(kernels)
        branches = self.profile or [self.branches] * end
        if len(branches) > end or not any(branches):
            fitting = branches[:end] if any(branches[:end]) else [*branches[: end - 1], self.branches]
            raise InputError(
                f"algorithm.tree.profile: {branches} are not the numbers of children of at most {end} stochastic steps, "
                f"take {fitting}"
            )
        steps = None if self.finish is None else self.finish.steps
        return plans.brush(kernels, [*branches, *[0] * (len(kernels) - len(branches))], steps)


class Pruning(Strict):
    """Which edges leave the update of a branch tree; see `flowgrpo.flow.methods.trees.pruning`.

    The window of `depth` first ends just before the last stochastic step (depths 15 to 18 of 20). It moves earlier
    until it touches the last split. The released code moves it on to the edges of that split.
    """

    rule: Literal["parent_top1", "extremes", "depth"]
    """What stays. parent_top1: each last split's best chain; extremes: best and worst chains; depth: all but a window."""
    fraction: float = Field(0.25, gt=0, lt=0.5)
    """Fraction of a group's chains that extremes keeps of the best, and again of the worst."""
    size: int = Field(4, ge=1)
    """Number of steps in the window that depth does not train."""
    every: int = Field(30, ge=1)
    """Iterations after which the window of depth moves one step earlier."""


class Branching(Rooted):
    """Options of branch trees: `factor` children at the steps `splits`, from a few roots.

    By default a tree splits n <= 4 times, with n the largest number for which `factor`^n divides the group size. The
    splits are spread over the first half of the steps: 0, 3, 6, 9 of 20. The noise of siblings is `correlated` in the
    paper, of strength s; it is `hot` in the released code: independent noise times s.
    """

    factor: int = Field(2, ge=2)
    """Number of children at each split."""
    splits: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Steps that split; null: at most four, as the group size allows, spread over the first half of the steps."""
    siblings: Literal["correlated", "hot", "own"] = "correlated"
    """Noise of siblings: correlated (the paper's), hot (the code's, breaks the marginals) or own (independent)."""
    strength: Positive = 4.0
    """Strength s of correlated or hot noise."""
    prune: Pruning | None = None
    """Which edges leave the update; null: none do."""

    @property
    def first_split(self) -> int:
        """Return the first step that splits."""
        return min(self.splits or [0])

    @override
    def roots(self, group_size: int) -> int:
        leaves = self.factor ** self._count(group_size)
        return count_roots(group_size, leaves, f"leaves of a tree with algorithm.tree.factor {self.factor}")

    @override
    def kept_edges(self, tree: Tree, advantages: Tensor) -> Tensor | None:
        if self.prune is None or self.prune.rule == "depth":
            return None
        if self.prune.rule == "parent_top1":
            return pruning.parent_top1(tree, advantages)
        return pruning.extremes(tree, advantages, self.prune.fraction)

    @property
    @override
    def keeps_groups_whole(self) -> str | None:
        extremes = self.prune is not None and self.prune.rule == "extremes"
        return "algorithm.tree.prune.rule=extremes" if extremes else None

    def _count(self, group_size: int) -> int:
        if self.splits is not None:
            return len(self.splits)
        return max((n for n in range(2, 5) if group_size % self.factor**n == 0), default=1)

    def _plan(self, kernels: Sequence[Kernel], group_size: int, iteration: int, window: range | None) -> Plan:
        end = self._end(kernels)
        splits = self.splits or schedule.spread(self._count(group_size), len(kernels) // 2)
        if max(splits) >= end or len(set(splits)) < len(splits):
            where = "" if self.splits else f", which a group of {group_size} asks for unless they are given,"
            raise InputError(
                f"algorithm.tree.splits: {splits}{where} are not different steps among the {end} stochastic ones, "
                f"0 to {end - 1}, take {sorted({min(split, end - 1) for split in splits})}"
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
        return plans.branch(
            kernels,
            splits,
            self.factor,
            stochastic=stochastic,
            trained=trained,
            sibling_strength=self.strength if self.siblings == "correlated" else None,
            noise_scale=self.strength if self.siblings == "hot" else 1.0,
        )


class Branch(Branching):
    """Trees that split, stochastic at every step but the last (BranchGRPO). Formula: `samplers.plans.branch`."""

    name: Literal["branch"] = "branch"

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        return self._plan(kernels, group_size, iteration, None)


class BranchWindow(Branching):
    """Trees that split, stochastic at the splits and inside a sliding window as in MixGRPO (BranchGRPO-Mix).

    Formula: `samplers.plans.branch`.
    """

    name: Literal["branch_window"] = "branch_window"
    size: int = Field(4, ge=0)
    """Number of steps in the stochastic window; 0: only the splits are stochastic."""
    every: int = Field(25, ge=1)
    """Iterations between two moves of the window."""
    stride: int = Field(1, ge=1)
    """Steps by which the window moves."""

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        end, window = self._end(kernels), range(0)
        if self.size:
            window = schedule.sliding_window(min(self.size, end), 0, end, iteration, self.every, self.stride)
        return self._plan(kernels, group_size, iteration, window)


class Twigs(Rooted):
    """Chains as in `chain`; an ODE side path (twig) from each state measures its value.

    DenseGRPO (arXiv 2601.20218) and its kin. Formula: `samplers.plans.twigs`.
    """

    name: Literal["twigs"] = "twigs"
    length: int | None = Field(None, ge=1)
    """ODE steps from a state to the sample that measures it; null: all that remain."""
    root: bool = True
    """Whether the start gets a twig, too."""
    finish: Finish | None = None
    """How the ODE steps of a twig after its first are taken; `steps` also bounds the twig's length. null: exactly."""

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        finish = None if self.finish is None else self.finish.steps
        bounds = [most for most in (self.length, finish) if most]
        return plans.twigs(kernels, range(self._end(kernels)), min(bounds, default=None), self.root)


def _check_steps(steps: list[int] | None, first: int, stop: int, end: int) -> None:
    if not 0 <= first < stop <= end:
        raise InputError(
            f"algorithm.tree.steps: {steps} are not steps among the {end} stochastic ones, take [0, {end}] or less"
        )
