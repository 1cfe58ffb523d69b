"""Drafts: sample many starts cheaply, then roll out the best and the worst of them.

A start is a seed, so a chosen start is sampled in full from the same noise as in its draft. If the draft has another
resolution or number of frames, the noise has another shape and therefore differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods.credit.rules import trunk_ends
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.advantages.unit_selection import extremes
from flowgrpo.training.distributed.assignment import Assignment
from flowgrpo.training.distributed.data_shard import WHOLE, DataShard
from flowgrpo.training.reports.metrics import mean
from flowgrpo.training.scoring.group_scores import Gather, Piece, score_pieces
from flowgrpo.training.weights.low_precision_copies import Copies
from rewards import Reward
from rewards.audio import join_samples
from samplers.batches import batched
from samplers.trees import Tree

Tensor = torch.Tensor


@dataclass(frozen=True)
class Chosen:
    """The chosen starts of each group, in the order of its roots, and their total draft rewards, NaN for lost ones."""

    starts: Sequence[Sequence[int]]
    rewards: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class DraftScore:
    """One root's total reward in the draft, and the mean over its final samples."""

    group: int
    draft: float
    final: float


class Drafting:
    """Settings of a run's drafts: other call arguments, and low-precision copies of the policy's layers."""

    def __init__(self, config: Config, policy: Policy, copies: Copies):
        self._settings, self._policy, self._copies = config.train.draft, policy, copies

    @property
    def call(self) -> dict[str, Any]:
        """Return the call arguments that the draft changes; {} without a draft."""
        return {} if self._settings is None else self._settings.call

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context in which the policy samples drafts."""
        with self._policy.call_overrides(**self.call), self._copies.drafting():
            yield


def take_first_starts(numbers: Sequence[int]) -> Chosen:
    """Return the first `numbers[i]` starts of group i, as chosen without a draft."""
    return Chosen([range(number) for number in numbers])


@torch.no_grad()
def run_draft(
    policy: Policy,
    pool: Assignment,
    rows: Sequence[Row],
    *,
    rewards: Sequence[Reward],
    combination: Combination,
    numbers: Sequence[int],
    micro_batch: int,
    gather: Gather,
    shard: DataShard = WHOLE,
) -> Chosen:
    """Sample a pool of starts by ODE; return the best and the worst starts of each group (Sol-RL, arXiv 2604.06916).

    Starts whose reward was lost rank in the middle. `pool` has the starts of each group and their assignment to
    processes. `rows` are the rows of this process's starts. `numbers` has how many starts to choose in each group.
    """

    def pieces() -> Iterator[Piece]:
        by_group = defaultdict(list)
        for (group, start), row in zip(pool.own, rows, strict=True):
            by_group[group].append((start, row))
        for group, members in by_group.items():
            starts, group_rows = zip(*members, strict=True)
            samples = join_samples([policy.generate(batch) for batch in batched(group_rows, micro_batch)])
            yield Piece(group, starts, samples, group_rows)

    total = combination.total(score_pieces(rewards, pieces(), pool, gather, shard=shard).values).tolist()
    totals = dict(zip(pool.own, total, strict=True))
    everyone = {member: value for process in gather([totals]) for member, value in process.items()}
    starts: list[list[int]] = []
    scores: list[Tensor] = []
    for group, number in enumerate(numbers):
        values = torch.tensor([value for member, value in sorted(everyone.items()) if member[0] == group]).double()
        if not len(values):  # no process of this data shard works on the group
            starts.append([])
            scores.append(values)
            continue
        middle = values[values.isfinite()].median() if values.isfinite().any() else 0.0
        best_and_worst = extremes(values.nan_to_num(float(middle)), number)
        starts.append(best_and_worst.tolist())
        scores.append(values[best_and_worst])
    return Chosen(starts, scores)


def pair_draft_with_final(tree: Tree, total: Tensor, draft_rewards: Sequence[Tensor]) -> list[DraftScore]:
    """Return for each root its draft reward and the mean reward of its samples; samples of twigs do not count.

    `total` (leaves,) has the samples' rewards. `draft_rewards` has a tensor (roots,) for each group. A lost reward is NaN.
    """
    by_root = defaultdict(list)
    for end in trunk_ends(tree):
        root = tree.nodes[tree.leaves[end]].root
        by_root[root.group, root.index].append(float(total[end]))
    roots = []
    for (group, index), finals in by_root.items():
        final = mean(torch.tensor(finals, dtype=torch.float64))
        roots.append(DraftScore(group, float(draft_rewards[group][index]), torch.nan if final is None else final))
    return roots


def agreement(roots: Sequence[DraftScore]) -> dict[str, float | None]:
    """Return metrics of how well the draft ranks each group's roots, averaged over groups; None without values.

    `draft/rank_agreement` is Spearman's correlation of draft and final rewards. `draft/halves_kept` is the share of roots
    that are in the same half, better or worse, by both rewards. Roots with a lost reward are left out.
    """
    by_group = defaultdict(list)
    for root in roots:
        by_group[root.group].append((root.draft, root.final))
    pairs = [torch.tensor(members, dtype=torch.float64) for _, members in sorted(by_group.items())]
    pairs = [members[members.isfinite().all(1)].unbind(1) for members in pairs]
    return {
        "draft/rank_agreement": mean(torch.tensor([spearman(*pair) for pair in pairs])),
        "draft/halves_kept": mean(torch.tensor([halves_kept(*pair) for pair in pairs])),
    }


def spearman(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two tensors (B,), with mean ranks for equal values; NaN if one is constant."""
    a, b = (ranks - ranks.mean() for ranks in (_ranks(a), _ranks(b)))
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())


def halves_kept(a: Tensor, b: Tensor) -> float:
    """Return the share of indices in the better half of both tensors (B,), or in the worse half of both; NaN if B < 2.

    If B is odd, the better half has one more. Ties at the middle are broken at random: the result is the expected share.
    """
    a, b = _better_half_chances(a), _better_half_chances(b)
    return float((a * b + (1 - a) * (1 - b)).mean()) if len(a) > 1 else torch.nan


def _ranks(values: Tensor) -> Tensor:
    """Return ranks (B,) from 0, with the mean rank for equal values."""
    below, equal = values[:, None] > values, values[:, None] == values
    return below.double().sum(1) + (equal.double().sum(1) - 1) / 2


def _better_half_chances(values: Tensor) -> Tensor:
    """Return the chance (B,) of each value to be in the better half, with equal values in random order."""
    above = (values > values[:, None]).double().sum(1)
    equal = (values == values[:, None]).double().sum(1)
    return (((len(values) + 1) // 2 - above) / equal).clamp(0, 1)
