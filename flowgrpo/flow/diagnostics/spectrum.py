"""Which share of the reward's variance the start and each step of the noisy sampler add, measured on real samples.

By the law of total variance Var(R) is that of E[R | start] plus, for each step, the expected variance of what its noise
changes: E Var(E[R | next state] | state). The part that comes after a state is half the expected squared difference of two
samples that part there and share no noise from there on, which needs no mean and is unbiased. So a chain is walked from each
start, at some steps a second one leaves it, and every pair of samples tells of the last state that both had. Shares add up
to 1; one that is small beside its error may come out below 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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

EVALUATIONS = 600  # of the model, at most, unless the fewest starts need more
FEWEST = 3  # starts of a prompt: without any one of them two are left to compare
ASIDE = "aside"
START = -1  # the last common state of samples from two starts


@dataclass(frozen=True, kw_only=True)
class VarianceShare:
    """What adds to the variance: the start, where `steps` is None, or the steps [first, end) of the schedule."""

    steps: tuple[int, int] | None
    share: float
    error: float

    @property
    def of(self) -> str:
        """What it is, in words."""
        if self.steps is None:
            return "start"
        first, last = self.steps[0], self.steps[1] - 1
        return f"step {first}" if first == last else f"steps {first} to {last}"


def nested(moves: Sequence[Move], splits: Iterable[int]) -> Plan:
    """Chains that take a move at each step of the schedule; at the `splits` a second one leaves each, and goes on alike."""
    parting = frozenset(splits)

    def plan(role: str, step: int) -> tuple[Move, ...]:
        onward = replace(moves[step], role=role)
        return (onward, replace(onward, role=ASIDE)) if role == TRUNK and step in parting else (onward,)

    return plan


def geometry(steps: int, prompts: int) -> tuple[range, int]:
    """Return the steps at which chains part, and how many starts a prompt has, within `EVALUATIONS`.

    Where a pair at each step is too much for the fewest starts, only every second one has one, or every fourth, and so on;
    what lies between two is told as one.
    """
    stride = 1
    while True:
        splits = range(0, steps - 1, stride)
        cost = steps + sum(steps - 1 - split for split in splits)
        starts = EVALUATIONS // (prompts * cost)
        if starts >= FEWEST or len(splits) == 1:
            return splits, max(starts, FEWEST)
        stride *= 2


def spectrum(tree: Tree, rewards: torch.Tensor) -> tuple[list[VarianceShare], float]:
    """Return the shares of the start and of the steps after it, with their standard errors, and the variance itself.

    Errors are those of leaving out one start at a time. Without variance there are no shares.

    Args:
        tree: from a plan of `nested`, of three starts or more in each group.
        rewards: (leaves,) float64, NaN where one was lost.
    """
    of_starts = _squares(tree, rewards)
    splits = sorted({split for own in of_starts.values() for split in own} - {START})
    sums = torch.tensor(
        [[own.get(split, (0.0, 0)) for split in (START, *splits)] for own in of_starts.values()], dtype=torch.float64
    ).reshape(len(of_starts), 1 + len(splits), 2)
    # A pair of two starts is with both of them.
    total = sums.sum(0) * torch.tensor([0.5, *[1.0] * len(splits)], dtype=torch.float64)[:, None]
    if not total[0, 0] > 0:
        return [], 0.0
    ends = [*splits[1:], max(len(tree.sigmas) - 2, splits[-1] + 1)]  # the last step has mostly no noise
    steps = [None, *zip(splits, ends, strict=True)]
    parts = _shares(total - sums)
    errors = ((len(parts) - 1) * (parts - parts.mean(0)).square().mean(0)).sqrt()
    shares = zip(steps, _shares(total).tolist(), errors.tolist(), strict=True)
    return [VarianceShare(steps=own, share=share, error=error) for own, share, error in shares], float(
        total[0, 0] / total[0, 1]
    )


def check(
    policy: Policy,
    rewards: Sequence[Reward],
    rows: Sequence[Row],
    *,
    baseline: Baseline,
    kernels: Sequence[Kernel],
    size: int,
) -> Check:
    """Tell the spectrum of a model; it judges nothing.

    Args:
        rows: one of each prompt.
        baseline: by which several rewards are put together.
        kernels: of each step of the schedule.
        size: most rows of a call.
    """
    if not any(kernel.stochastic for kernel in kernels):
        return Check("spectrum", True, f"{kernels[0].name} adds no noise: the start makes all of the variance")
    splits, starts = geometry(len(kernels), len(rows))
    roots = [
        Root(group, start, Row(row.prompt, 1000 * (1 + group) + start, row.columns))
        for group, row in enumerate(rows)
        for start in range(starts)
    ]
    before = policy.evaluations
    with phase("measuring steps"), warnings_heard():  # of rewards that fail `group_spread` tells
        plan = nested([*map(Move, kernels[:-1]), Move()], splits)
        tree, scores = rollout(policy, plan, roots, rewards=rewards, micro_batch=size, seed=0, iteration=0)
    shares, variance = spectrum(tree, Combination.of(rewards, baseline).total(scores.values))
    cost = f"{policy.evaluations - before} evaluations, {len(tree.leaves)} samples"
    if not shares:
        return Check("spectrum", True, f"the reward has no variance to share out ({cost})")
    largest = max(shares, key=lambda share: share.share)
    told = f"variance {variance:.2g}, the most of {largest.of}: {largest.share:.0%} ± {largest.error:.0%} ({cost})"
    table = [{"of": s.of, "share": s.share, "error": s.error} for s in shares]
    return Check("spectrum", True, told, table=table)


Squares = dict[int, tuple[float, int]]  # by the step where samples part: halves of squared differences, and how many


def _squares(tree: Tree, rewards: torch.Tensor) -> dict[tuple[int, int], Squares]:
    """By group and start, the pairs of known samples that a start has a part in."""
    of_group = defaultdict(list)
    for leaf, value in zip(tree.leaves, rewards.tolist(), strict=True):
        if value == value:
            root = tree.nodes[leaf].root
            parents = (tree.nodes[edge].parent for edge in tree.ancestry(leaf))
            states = {parent for parent in parents if parent is not None}
            of_group[root.group].append(((root.group, root.index), states, value))
    found: dict[tuple[int, int], Squares] = defaultdict(dict)
    for samples in of_group.values():
        for (one, its, a), (other, others, b) in combinations(samples, 2):
            parted = START if one != other else max(tree.nodes[state].step for state in its & others)
            for start in {one, other}:
                total, number = found[start].get(parted, (0.0, 0))
                found[start][parted] = total + (a - b) ** 2 / 2, number + 1
    return dict(sorted(found.items()))


def _shares(sums: torch.Tensor) -> torch.Tensor:
    """Shares (..., P) of sums and numbers (..., P, 2): what comes after each part less what comes after the next."""
    variances = sums[..., 0] / sums[..., 1]
    after = torch.cat([variances[..., 1:], torch.zeros_like(variances[..., :1])], dim=-1)
    return (variances - after) / variances[..., :1]
