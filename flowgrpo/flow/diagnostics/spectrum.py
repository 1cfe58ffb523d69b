"""The variance spectrum: the shares of the reward's variance that the start and each noisy step add.

By the law of total variance Var(R) is Var(E[R | start]) plus, for each step, E Var(E[R | next state] | state). The variance
after a state is half the expected squared difference of two samples that part there and share no later noise. This estimate
is unbiased and needs no mean. So a chain is sampled from each start, and further chains leave it at some steps. Where a
third of the schedule begins, those part as well. Every pair of samples contributes to the estimate at its last common
state. Shares sum to 1; a small share may be estimated below 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.rollout import rollout
from flowgrpo.training.advantages.baseline import Baseline
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.reports.doctor_checks import Check, warnings_heard
from flowgrpo.training.run.phases import phase
from rewards import Reward
from samplers.trees import TRUNK, Move, Plan, Root, Tree

if TYPE_CHECKING:
    from samplers.kernels import Kernel

SECONDS = 60.0  # what a check takes unless told, about
EVALUATIONS = 600  # least budget of model evaluations
PROMPTS = 24  # that share a budget, at most
FEWEST = 3  # starts per prompt: the jackknife leaves one out and needs two others
ENOUGH = 300  # starts of all prompts with which thirds of the steps are cut into shorter parts
ASIDE, PARTING = "aside", "parting"  # roles of chains that left the trunk; the latter part again
Squares = dict[int, tuple[float, int]]  # step of the split -> sum of half squared differences, and number of pairs
START = -1  # stands for the last common state of samples from two starts, which have none


@dataclass(frozen=True, kw_only=True)
class VarianceShare:
    """The share of the start (`steps` is None) or of the steps [first, end) of the schedule, with its standard error."""

    steps: tuple[int, int] | None
    share: float
    error: float

    @property
    def of(self) -> str:
        """Return the start or the steps as text, such as "steps 2 to 3"."""
        if self.steps is None:
            return "start"
        first, last = self.steps[0], self.steps[1] - 1
        return f"step {first}" if first == last else f"steps {first} to {last}"


def plan_nested(moves: Sequence[Move], splits: Iterable[int], all_part: Iterable[int] = ()) -> Plan:
    """Plan chains with one move per step; at each step of `splits` a second chain branches off and takes the same moves.

    At those that are in `all_part`, too, each chain that began at one of them parts as well.
    """
    of_trunk = frozenset(splits)
    of_all = of_trunk.intersection(all_part)

    def plan(role: str, step: int) -> tuple[Move, ...]:
        onward = replace(moves[step], role=role)
        if role == TRUNK and step in of_trunk:
            return onward, replace(onward, role=PARTING if step in of_all else ASIDE)
        return (onward, onward) if role == PARTING and step in of_all else (onward,)

    return plan


def thirds(steps: int) -> list[int]:
    """Return the steps at which thirds of a schedule begin, without the last step, which has no noise."""
    return sorted({steps * third // 3 for third in range(3)} - {steps - 1})


def cost_of_start(steps: int, splits: Iterable[int]) -> int:
    """Return the model evaluations of one start, whose chains part at `splits`, and all at those that begin `thirds`."""
    of_all = thirds(steps)
    whole = sum(2 ** sum(split < step for split in of_all) for step in range(steps))
    return whole + sum(steps - 1 - split for split in splits if split not in of_all)


def starts_of(cost: int, prompts: int, evaluations: int) -> tuple[int, int]:
    """Return for how many of `prompts` a budget is enough, at least one, and the starts of each, `FEWEST` or more.

    `cost` are the model evaluations of one start.
    """
    prompts = min(prompts, max(1, evaluations // (FEWEST * cost)))
    return prompts, max(FEWEST, evaluations // (prompts * cost))


def geometry(steps: int, prompts: int, evaluations: int) -> tuple[list[int], int, int]:
    """Return the steps at which chains split, the number of prompts and the number of starts of each.

    The steps from one split to the next have one common share. They are single steps if `evaluations` pay for `ENOUGH`
    starts, else 24ths, 12ths, 6ths or thirds of the schedule.
    """
    parts = [steps, *(3 * 2**k for k in (3, 2, 1, 0) if 3 * 2**k < steps)]
    for number in parts:
        splits = sorted({steps * part // number for part in range(number)} - {steps - 1})  # the last step has no noise
        found = starts_of(cost_of_start(steps, splits), prompts, evaluations)
        if math.prod(found) >= ENOUGH:
            break
    return splits, *found


def spectrum(tree: Tree, rewards: torch.Tensor) -> tuple[list[VarianceShare], float]:
    """Return the variance shares of the start and the steps, and the total variance.

    Errors are jackknife errors over the starts of each group; the groups' prompts count as given.

    `tree` is grown by a plan of `plan_nested`, with three or more starts per group. `rewards` (leaves,) float64 is NaN where
    lost. Without variance, [] and 0 are returned.
    """
    of_starts = squares_of(tree, rewards)
    return shares_of(of_starts, _splits(of_starts), len(tree.sigmas) - 2)


def shares_of(
    of_starts: Mapping[tuple[int, int], Squares], begins: Sequence[int], end: int
) -> tuple[list[VarianceShare], float]:
    """Return what `spectrum` does, for parts of the schedule that begin at `begins`; the noisy steps stop before `end`.

    `begins` are steps that split, with the first of them.
    """
    sums = torch.tensor(
        [[squares.get(split, (0.0, 0)) for split in (START, *begins)] for squares in of_starts.values()],
        dtype=torch.float64,
    ).reshape(len(of_starts), 1 + len(begins), 2)
    # A pair of samples from two starts is in the sums of both starts.
    total = sums.sum(0) * torch.tensor([0.5, *[1.0] * len(begins)], dtype=torch.float64)[:, None]
    if not total[0, 0] > 0:
        return [], 0.0
    ends = [*begins[1:], max(end, begins[-1] + 1)] if begins else []
    steps = [None, *zip(begins, ends, strict=True)]
    groups = torch.tensor([group for group, _ in of_starts])
    without = [_shares(total - sums[groups == group]) for group in groups.unique()]
    squares = [(len(of) - 1) / len(of) * (of - of.mean(0)).square().sum(0) for of in without]
    errors = torch.stack(squares).sum(0).sqrt()
    columns = zip(steps, _shares(total).tolist(), errors.tolist(), strict=True)
    shares = [VarianceShare(steps=part, share=share, error=error) for part, share, error in columns]
    return shares, float(total[0, 0] / total[0, 1])


def roots_of(rows: Sequence[Row], starts: int) -> list[Root]:
    """Return so many roots of each row, with seeds of their own; each row is a group."""
    return [
        Root(group, start, Row(row.prompt, 1000 * (1 + group) + start, row.columns))
        for group, row in enumerate(rows)
        for start in range(starts)
    ]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The check `spectrum`, with the shares (empty without variance) and the seconds of the rewards of one sample."""

    check: Check
    shares: Sequence[VarianceShare] = ()
    reward_seconds: float = 0.0


def measure(
    policy: Policy,
    rewards: Sequence[Reward],
    rows: Sequence[Row],
    *,
    baseline: Baseline,
    kernels: Sequence[Kernel],
    size: int,
    evaluations: int,
) -> Measured:
    """Measure the spectrum of a model, given one row per prompt and the kernel of each step; the check always passes."""
    steps = len(kernels)
    splits, prompts, starts = geometry(steps, len(rows), evaluations)
    roots = roots_of(rows[:prompts], starts)
    before = policy.evaluations
    with phase("measuring steps"), warnings_heard():  # `group_spread` reports failed rewards
        plan = plan_nested([*map(Move, kernels[:-1]), Move()], splits, thirds(steps))
        tree, scores = rollout(policy, plan, roots, rewards=rewards, micro_batch=size, seed=0, iteration=0)
    totals = Combination.of(rewards, baseline).total(scores.values)
    of_starts = squares_of(tree, totals)
    shares, variance = shares_of(of_starts, _splits(of_starts), steps - 1)
    cost = f"{policy.evaluations - before} evaluations, {len(tree.leaves)} samples"
    if not shares:
        return Measured(check=Check("spectrum", True, f"the reward has no variance to share out ({cost})"))
    if not all(math.isfinite(each.share) and math.isfinite(each.error) for each in shares):
        return Measured(check=Check("spectrum", True, f"too many rewards are lost to measure all steps ({cost})"))
    coarse, _ = shares_of(of_starts, thirds(steps), steps - 1)
    parts = ", ".join(f"{each.of} {each.share:.0%} ± {each.error:.0%}" for each in coarse)
    summary = f"of the reward's variance {variance:.2g} by {kernels[0].name} {kernels[0].level:g}: {parts} ({cost})"
    table = [{"of": s.of, "share": s.share, "error": s.error} for s in shares]
    seconds = scores.seconds / len(tree.leaves)
    return Measured(check=Check("spectrum", True, summary, table=table), shares=shares, reward_seconds=seconds)


def decided_at(
    policy: Policy,
    rewards: Sequence[Reward],
    roots: Sequence[Root],
    *,
    baseline: Baseline,
    kernels: Sequence[Kernel],
    split: int,
    size: int,
) -> float:
    """Return the share of the reward's variance that the noise of step `split` decides, if all other steps have none.

    Each root has two samples, which part there; every group needs two roots or more. NaN rewards are left out.
    """

    def plan(role: str, step: int) -> tuple[Move, ...]:
        return (Move(kernels[split], count=2) if step == split else Move(),)

    with phase("measuring a split"), warnings_heard():
        tree, scores = rollout(policy, plan, roots, rewards=rewards, micro_batch=size, seed=0, iteration=0)
    totals = Combination.of(rewards, baseline).total(scores.values)
    siblings: list[float] = []
    strangers: list[float] = []
    leaves = [(tree.nodes[leaf].root, value) for leaf, value in zip(tree.leaves, totals.tolist(), strict=True)]
    for (one, a), (other, b) in combinations([each for each in leaves if each[1] == each[1]], 2):
        if one.group == other.group:
            (siblings if one.index == other.index else strangers).append((a - b) ** 2)
    if not siblings or not sum(strangers):
        return 0.0
    return sum(siblings) / len(siblings) / (sum(strangers) / len(strangers))


def _splits(of_starts: Mapping[tuple[int, int], Squares]) -> list[int]:
    return sorted({split for squares in of_starts.values() for split in squares} - {START})


def squares_of(tree: Tree, rewards: torch.Tensor) -> dict[tuple[int, int], Squares]:
    """Return for each (group, start) the `Squares` of all pairs of samples with at least one sample of this start.

    Samples without a reward are left out.
    """
    of_group: dict[int, dict[int, list[tuple[set[int], float]]]] = defaultdict(lambda: defaultdict(list))
    for leaf, value in zip(tree.leaves, rewards.tolist(), strict=True):
        if value == value:
            root = tree.nodes[leaf].root
            parents = (tree.nodes[edge].parent for edge in tree.ancestry(leaf))
            states = {parent for parent in parents if parent is not None}
            of_group[root.group][root.index].append((states, value))
    squares: dict[tuple[int, int], Squares] = {}
    for group, starts in sorted(of_group.items()):
        values = [value for samples in starts.values() for _, value in samples]
        mean = sum(values) / len(values)  # subtracted, so that the sums of squares lose no digits
        number, total = len(values), sum((value - mean) ** 2 for value in values)
        for start, samples in sorted(starts.items()):
            own = [value - mean for _, value in samples]
            n, square, rest = len(own), sum(value**2 for value in own), number - len(own)
            apart = (rest * square + n * (total - square)) / 2 + sum(own) ** 2  # the other samples sum to minus `own`
            found = {START: (apart, n * rest)} if rest else {}
            for (states, a), (others, b) in combinations(samples, 2):
                split = max(tree.nodes[state].step for state in states & others)
                sums, pairs = found.get(split, (0.0, 0))
                found[split] = sums + (a - b) ** 2 / 2, pairs + 1
            squares[group, start] = found
    return squares


def _shares(sums: torch.Tensor) -> torch.Tensor:
    """Return shares (..., P) from (sum, count) (..., P, 2): differences of successive variances, divided by the first."""
    variances = sums[..., 0] / sums[..., 1]
    after = torch.cat([variances[..., 1:], torch.zeros_like(variances[..., :1])], dim=-1)
    return (variances - after) / variances[..., :1]
