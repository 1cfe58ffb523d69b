"""Rollouts: grow the trees of an iteration, decode their leaves, and score them while the next ones are decoded."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.methods.credit import trunk_ends
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.training.baseline import combined
from flowgrpo.training.groups import Groups
from flowgrpo.training.phases import phase
from flowgrpo.training.scorer import Scorer, Scores, score
from flowgrpo.training.selection import extremes
from rewards import Reward
from samplers import noise
from samplers.batches import batched
from samplers.trees import Plan, Root, Tree, grow

WAITING = 4  # decoded groups that may wait for their scores, so that a slow reward does not fill the memory


@dataclass(frozen=True)
class Batch:
    """This process's trees of an iteration, decoded and scored.

    Attributes:
        groups: of the iteration, on all processes.
        tree: the trees, as one.
        scores: in the order of `tree.leaves`.
        drafts: samples that were decoded to choose the roots.
    """

    groups: Groups
    tree: Tree
    scores: Scores
    drafts: int

    @property
    def outcomes(self) -> tuple[torch.Tensor, list[int]]:
        """Rewards (E, R) of the ends of the trunks, and the group of each."""
        ends = trunk_ends(self.tree)
        return self.scores.values[ends], [self.tree.nodes[self.tree.leaves[end]].root.group for end in ends]

    @property
    def decoded(self) -> int:
        """How many samples were decoded for it."""
        return len(self.tree.leaves) + self.drafts

    @property
    def counts(self) -> dict[str, int]:
        """Further counts for the metrics, of which a flow model has none."""
        return {}


@torch.no_grad()
def rollout(
    policy: Policy,
    plan: Plan,
    roots: Sequence[Root],
    *,
    rewards: Sequence[Reward],
    micro_batch: int,
    seed: int,
    iteration: int,
    keep_means: bool = False,
) -> tuple[Tree, Scores]:
    """Grow and score the trees of one iteration; return them as one tree, and the scores in the order of its leaves.

    Args:
        roots: their rows are `Row`s.
        micro_batch: rows in one call of the model.
        seed: of the run; with `iteration`, the head of every noise address.
        keep_means: whether trained edges keep the mean of their step.
    """
    rows = [root.row for root in roots]
    parts = [policy.start(batch) for batch in batched(rows, micro_batch)]
    start = tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def edge_noise(shape, *address):
        return noise.noise(shape, seed, "edge", iteration, *address)

    tree = grow(plan, policy.sigmas, roots, start, policy.velocity, edge_noise, micro_batch, keep_means)
    return tree, _score_leaves(policy, tree, rewards, micro_batch)


@torch.no_grad()
def drafted(
    policy: Policy,
    rows: Sequence[Row],
    *,
    rewards: Sequence[Reward],
    weights: torch.Tensor,
    number: int,
    micro_batch: int,
) -> list[Row]:
    """Sample rows of one group by ODE, and return the `number` of them with the best and the worst rewards (Sol-RL).

    Rows whose reward was lost rank in the middle.

    Args:
        weights: (R,) of the rewards.
    """
    samples = torch.cat([policy.generate(batch) for batch in batched(rows, micro_batch)])
    total = combined(score(rewards, samples, rows).values, weights)
    middle = total[total.isfinite()].median() if total.isfinite().any() else 0.0
    return [rows[i] for i in extremes(total.nan_to_num(float(middle)), number)]


def _decoded(
    policy: Policy, tree: Tree, indices: Sequence[int], *, rows: Sequence[Row], micro_batch: int
) -> torch.Tensor:
    """The samples of some leaves."""
    parts = zip(batched(indices, micro_batch), batched(rows, micro_batch), strict=True)
    return torch.cat([policy.decode(tuple(x[own] for x in tree.samples), batch) for own, batch in parts])


def _score_leaves(policy: Policy, tree: Tree, rewards: Sequence[Reward], micro_batch: int) -> Scores:
    """Decode group by group; groups are scored in threads while the next are decoded, at most `WAITING` behind."""
    by_group = defaultdict(list)
    for index, leaf in enumerate(tree.leaves):
        by_group[tree.nodes[leaf].root.group].append(index)
    scored: list[Scores] = []
    with Scorer(rewards) as scorer:
        pending = deque()
        with phase("decoding", len(tree.leaves)) as decoding:
            for indices in by_group.values():
                if len(pending) == WAITING:
                    scored.append(pending.popleft()())
                rows = [tree.nodes[tree.leaves[i]].root.row for i in indices]
                pending.append(scorer.submit(_decoded(policy, tree, indices, rows=rows, micro_batch=micro_batch), rows))
                decoding.advance(len(rows))
        with phase("rewards"):
            scored += [wait() for wait in pending]
    order = torch.tensor([i for indices in by_group.values() for i in indices]).argsort()
    return Scores(
        torch.cat([s.values for s in scored])[order],
        torch.cat([s.lost for s in scored])[order],
        sum(s.seconds for s in scored),
    )
