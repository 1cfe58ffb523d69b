"""Rollouts: grow the trees of an iteration, decode their leaves, and score them while the next ones are decoded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.methods.credit.rules import trunk_ends
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.state_preview import StatePreview
from flowgrpo.training.advantages.prompt_groups import Groups
from flowgrpo.training.distributed.assignment import Assignment
from flowgrpo.training.distributed.data_share import WHOLE, DataShard
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.group_scores import Gather, Piece, score_pieces
from flowgrpo.training.scoring.scorer import Scores
from rewards import Reward
from samplers import noise
from samplers.batches import batched
from samplers.finishes import Finish, grow_and_finish
from samplers.solvers import solve
from samplers.trees import Evaluate, Noise, Plan, Root, Tree, grow


@dataclass(frozen=True)
class Pair:
    """What is compared with its siblings, as the cheap finish and the exact one value it.

    Attributes:
        siblings: the integers by which units are compared that are equal for siblings, the group first.
    """

    siblings: tuple[int, ...]
    cheap: float
    exact: float


@dataclass(frozen=True)
class Finished:
    """What is known of an iteration's cheap finishes on this process.

    Attributes:
        counts: for the metrics.
        pairs: of what was finished exactly, too; None where nothing was asked for.
        decoded: samples of that.
    """

    counts: dict[str, int]
    pairs: Sequence[Pair] | None = None
    decoded: int = 0


class Drawn(Protocol):
    """What an engine tells of the edges that it walked."""

    @property
    def correction(self) -> torch.Tensor:
        """Weight (nodes,) of the edge to each node for having been walked by another policy."""

    def line(self, run: Any) -> dict[str, Any]:
        """Metrics of the mismatch between the engine and the policy."""


@dataclass(frozen=True)
class Batch:
    """This process's trees of an iteration, decoded and scored.

    Attributes:
        groups: of the iteration, on all processes.
        tree: the trees, as one.
        scores: in the order of `tree.leaves`.
        drafts: samples that were decoded to choose the roots.
        draft_rewards: (roots,) of each group, total reward of each root's start in the draft that chose it, NaN if it was
            lost; None without a draft.
        engine: what an engine tells of the edges that it walked; None without one.
        stored: whether the samples were there before, so that nothing was decoded.
        previews: of the trees that are kept to be looked at.
        finished: how trees were finished cheaply, as far as that is known; None where they were not.
    """

    groups: Groups
    tree: Tree
    scores: Scores
    drafts: int
    _: KW_ONLY
    draft_rewards: Sequence[torch.Tensor] | None = None
    engine: Drawn | None = None
    stored: bool = False
    previews: Sequence[StatePreview] = ()
    finished: Finished | None = None

    @property
    def outcomes(self) -> tuple[torch.Tensor, list[int]]:
        """Rewards (E, R) of the ends of the trunks, and the group of each."""
        ends = trunk_ends(self.tree)
        return self.scores.values[ends], [self.tree.nodes[self.tree.leaves[end]].root.group for end in ends]

    @property
    def decoded(self) -> int:
        """How many samples were decoded for it."""
        compared = 0 if self.finished is None else self.finished.decoded
        return 0 if self.stored else len(self.tree.leaves) + self.drafts + compared

    @property
    def counts(self) -> dict[str, int]:
        """Further counts for the metrics: of trees that were finished cheaply."""
        return {} if self.finished is None else self.finished.counts


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
    solver: str | None = None,
    keep_means: bool = False,
    keep_graphs: Container[int] = (),
    assignment: Assignment | None = None,
    gather: Gather = list,
    share: DataShard = WHOLE,
    evaluate: Evaluate | None = None,
    finish: Finish | None = None,
) -> tuple[Tree, Scores]:
    """Grow and score the trees of one iteration; return them as one tree, and the scores in the order of its leaves.

    Args:
        roots: this process's; their rows are `Row`s.
        micro_batch: rows in one call of the model.
        seed: of the run; with `iteration`, the head of every noise address.
        solver: a multistep one (`samplers.solvers`) that walks chains to their ends, instead of the plan; None: the plan.
        keep_means: whether trained edges keep the mean of their step.
        keep_graphs: parts whose trained evaluations keep the graph of their velocity.
        assignment, gather, share: see `score_pieces`.
        evaluate: what trees grow by; None: the policy's velocity.
        finish: what walks ODE steps that only lead to a reward, several in a call; None: what trees grow by.
    """
    tree = walk(
        policy,
        plan,
        roots,
        micro_batch=micro_batch,
        seed=seed,
        iteration=iteration,
        solver=solver,
        keep_means=keep_means,
        keep_graphs=keep_graphs,
        evaluate=evaluate,
        finish=finish,
    )

    def decode(leaves: Sequence[int], own: Sequence[Row]) -> torch.Tensor:
        return policy.decode(tuple(x[list(leaves)] for x in tree.samples), own)

    return tree, score_leaves(tree, decode, rewards, micro_batch, assignment=assignment, gather=gather, share=share)


@torch.no_grad()
def walk(
    policy: Policy,
    plan: Plan,
    roots: Sequence[Root],
    *,
    micro_batch: int,
    seed: int,
    iteration: int,
    solver: str | None = None,
    keep_means: bool = False,
    keep_graphs: Container[int] = (),
    evaluate: Evaluate | None = None,
    finish: Finish | None = None,
) -> Tree:
    """Grow the trees of one iteration, as one; arguments as of `rollout`."""
    rows = [root.row for root in roots]
    parts = [policy.start(batch) for batch in batched(rows, micro_batch)]
    start = tuple(torch.cat(column) for column in zip(*parts, strict=True))

    evaluate = evaluate or policy.velocity
    if solver is None:
        noises = edge_noise(seed, iteration)
        given = (plan, policy.sigmas, roots, start, evaluate, noises, micro_batch, keep_means, keep_graphs)
        return grow(*given) if finish is None else grow_and_finish(*given, finish=finish)
    return solve(solver, policy.sigmas, roots, start, evaluate, micro_batch)


def edge_noise(seed: int, iteration: int) -> Noise:
    """The noise of the edges of an iteration's trees."""
    return lambda shape, *address: noise.noise(shape, seed, "edge", iteration, *address)


@torch.no_grad()
def score_leaves(
    tree: Tree,
    decode: Callable[[Sequence[int], Sequence[Row]], torch.Tensor],
    rewards: Sequence[Reward],
    micro_batch: int,
    *,
    assignment: Assignment | None = None,
    gather: Gather = list,
    share: DataShard = WHOLE,
) -> Scores:
    """Decode the leaves of a tree, score them, and return the scores in the order of the leaves.

    Args:
        decode: the samples of some leaves, given by their places among all, with the rows of each.
        micro_batch: most leaves of one call of it.
        assignment, gather, share: see `score_pieces`.
    """
    by_group = defaultdict(list)
    for index, leaf in enumerate(tree.leaves):
        by_group[tree.nodes[leaf].root.group].append(index)
    for own in by_group.values():  # in an order that does not depend on who grew what
        own.sort(key=lambda index: tree.nodes[tree.leaves[index]].path)
    scores = score_pieces(rewards, _decoded(decode, tree, by_group, micro_batch), assignment, gather, share=share)
    order = torch.tensor([index for own in by_group.values() for index in own]).argsort()
    return Scores(scores.values[order], scores.lost[order], scores.seconds)


def _decoded(
    decode: Callable[[Sequence[int], Sequence[Row]], torch.Tensor],
    tree: Tree,
    by_group: dict[int, list[int]],
    micro_batch: int,
) -> Iterator[Piece]:
    """The samples of each group's leaves, decoded when they are asked for."""
    with phase("decoding", len(tree.leaves)) as decoding:
        for group, indices in by_group.items():
            nodes = [tree.nodes[tree.leaves[index]] for index in indices]
            rows = [node.root.row for node in nodes]
            parts = zip(batched(indices, micro_batch), batched(rows, micro_batch), strict=True)
            samples = [decode(own, batch) for own, batch in parts]
            yield Piece(group, [node.path for node in nodes], torch.cat(samples), rows)
            decoding.advance(len(rows))
