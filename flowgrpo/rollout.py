"""Rollouts: grow the trees of an iteration, decode their leaves, and score them while the next ones are decoded."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from flowgrpo.policy import Policy, Row
from rewards import Reward
from samplers import noise
from samplers.trees import Plan, Root, Tree, grow

ATTEMPTS = 3


@dataclass(frozen=True)
class Scores:
    """Rewards of samples.

    Attributes:
        values: (B, R) float64; NaN where a reward does not apply or the sample is lost.
        lost: (B,) samples for which some reward failed to the end.
        seconds: time spent inside the reward functions.
    """

    values: torch.Tensor
    lost: torch.Tensor
    seconds: float


@torch.no_grad()
def score(rewards: Sequence[Reward], samples: torch.Tensor, rows: Sequence[Row], one_group: bool = True) -> Scores:
    """Every reward of every sample. A reward that raises is tried again, then its samples count as lost.

    Args:
        one_group: whether the samples are one group; otherwise each is a group of its own, and group-wise rewards meet
            them one by one.
    """
    started = time.perf_counter()
    columns = []
    for reward in rewards:
        size = len(rows) if one_group or not reward.group_wise else 1
        calls = [slice(at, at + size) for at in range(0, len(rows), size)]
        columns.append(torch.cat([_attempt(reward, samples[call], rows[call]) for call in calls]))
    values = torch.stack(columns, dim=1)
    lost = values.isinf().any(1)
    values[lost] = torch.nan
    return Scores(values, lost, time.perf_counter() - started)


def _attempt(reward: Reward, samples: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    prompts = [row.prompt for row in rows]
    columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return reward(samples, prompts, columns)
        except Exception as error:  # a plug-in may raise anything; what it raised is reported
            problem = f"{type(error).__name__}: {error}"
            time.sleep(0.1 * (attempt - 1))
    warnings.warn(
        f"the reward {reward.name!r} failed {ATTEMPTS} times ({problem}); its {len(prompts)} samples are dropped",
        stacklevel=2,
    )
    return torch.full((len(prompts),), torch.inf, dtype=torch.float64)


@dataclass(frozen=True)
class Rollout:
    """A scored tree; `scores` is in the order of `tree.leaves`."""

    tree: Tree
    scores: Scores


@torch.no_grad()
def rollout(
    policy: Policy,
    plan: Plan,
    roots: Sequence[Root],
    rewards: Sequence[Reward],
    micro_batch: int,
    seed: int,
    iteration: int,
    keep_means: bool = False,
) -> Rollout:
    """Grow and score the trees of one iteration.

    Args:
        roots: their rows are `Row`s.
        seed: of the run; with `iteration`, the head of every noise address.
        keep_means: whether trained edges keep the mean of their step.
    """
    rows = [root.row for root in roots]
    parts = [policy.start(rows[at : at + micro_batch]) for at in range(0, len(rows), micro_batch)]
    start = tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def edge_noise(shape, group, path, step, component):
        return noise.noise(shape, seed, "edge", iteration, group, path, step, component)

    tree = grow(plan, policy.sigmas, roots, start, policy.velocity, edge_noise, micro_batch, keep_means)
    return Rollout(tree, _score_leaves(policy, tree, rewards, micro_batch))


def _score_leaves(policy: Policy, tree: Tree, rewards: Sequence[Reward], micro_batch: int) -> Scores:
    """Decode group by group; one group is scored in a thread while the next is decoded."""
    by_group = defaultdict(list)
    for place, leaf in enumerate(tree.leaves):
        by_group[tree.nodes[leaf].root.group].append(place)
    with ThreadPoolExecutor(1) as thread:
        pending = []
        for places in by_group.values():
            rows = [tree.nodes[tree.leaves[i]].root.row for i in places]
            decoded = [
                policy.decode(
                    tuple(x[places[at : at + micro_batch]] for x in tree.samples), rows[at : at + micro_batch]
                )
                for at in range(0, len(places), micro_batch)
            ]
            pending.append(thread.submit(score, rewards, torch.cat(decoded), rows))
        scored = [job.result() for job in pending]
    order = torch.tensor([i for places in by_group.values() for i in places]).argsort()
    return Scores(
        torch.cat([s.values for s in scored])[order],
        torch.cat([s.lost for s in scored])[order],
        sum(s.seconds for s in scored),
    )
