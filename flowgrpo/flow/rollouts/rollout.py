"""Rollouts: grow the trees of an iteration, decode their leaves, and score samples while the next are made."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.methods.credit.rules import trunk_ends
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.early_stop import Stopped
from flowgrpo.flow.rollouts.state_preview import StatePreview
from flowgrpo.training.distributed.assignment import Assignment, Member
from flowgrpo.training.distributed.data_shard import WHOLE, DataShard
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.group_scores import Gather, Piece, PieceScoring, are_remote
from flowgrpo.training.scoring.scorer import Scores
from rewards import Reward
from rewards.audio import Films, join_samples
from samplers import noise
from samplers.batches import batched
from samplers.growth import Finish, Landed, grow, grow_and_finish
from samplers.kernels import State
from samplers.pruning import replace_roots
from samplers.trees import Evaluate, Gate, Noise, Plan, Root, Tree, stack_states

# Returns the samples of leaves, from their indices among the leaves of a tree and their rows.
Decode = Callable[[Sequence[int], Sequence[Row]], torch.Tensor | Films]


@dataclass(frozen=True)
class Pair:
    """The values of one credit unit after a cheap and an exact finish; `siblings` is the key of its comparison set."""

    siblings: tuple[int, ...]
    cheap: float
    exact: float


@dataclass(frozen=True)
class Finished:
    """Statistics of an iteration's cheap finishes.

    Attributes:
        counts: counts for the metrics.
        pairs: values of the units that a check compared; None if no check was due.
        decoded: number of samples that the check decoded.
    """

    counts: dict[str, int]
    pairs: Sequence[Pair] | None = None
    decoded: int = 0


@dataclass(frozen=True)
class Trial:
    """A group with hints: the step at which its hinted trees start, and the share of their samples that succeed."""

    group: int
    prompt: int
    step: int
    success: float


@dataclass(frozen=True, kw_only=True)
class Hinted:
    """What a process's hints have done in an iteration; see `flow.rollouts.hinted_rollout`.

    Attributes:
        rewards, members: rewards (E, R) and roots, as (group, index), of the samples without hints.
        won: samples and candidates that succeeded without a hint, as (group, prompt, state).
        samples: number of trajectories with a hint.
        searched, found: number of groups whose prompt got candidates, and of those in which one succeeded.
        decoded: number of decoded samples outside the tree: those that hints replaced, and candidates.
    """

    rewards: torch.Tensor
    members: list[Member]
    won: Sequence[tuple[int, int, State]]
    trials: Sequence[Trial] = ()
    samples: int = 0
    searched: int = 0
    found: int = 0
    decoded: int = 0


class Drawn(Protocol):
    """Importance weights and metrics of edges that an engine sampled."""

    @property
    def correction(self) -> torch.Tensor:
        """Importance weight (nodes,) of the edge to each node, which corrects for the engine's own policy."""

    def line(self, run: Any) -> dict[str, Any]:
        """Return the metrics of the mismatch between the engine and the policy."""


@dataclass(frozen=True)
class Batch:
    """This process's trees of an iteration, decoded and scored; the groups are those of all processes.

    Attributes:
        drafts: number of samples that were decoded to choose the roots.
        draft_rewards: (roots,) for each group, total rewards in the draft, NaN for lost ones; None without a draft.
        engine: importance weights and metrics of edges that an engine sampled; None without one.
        stored: whether the samples come from `data.groups`, so that nothing was decoded.
        stopped: the early stop of the chains; None if all went to the end.
        first: the outcomes of the first stage; None if there is one stage.
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
    stopped: Stopped | None = None
    hinted: Hinted | None = None
    first: tuple[torch.Tensor, list[Member]] | None = None

    @property
    def outcomes(self) -> tuple[torch.Tensor, list[Member]]:
        """Return the rewards (E, R) of the E ends of trajectories without hints, and the root of each end.

        With a second stage they are those of the first. With an early stop they are unbiased estimates for all chains; see
        `Stopped.outcomes`.
        """
        if self.first is not None:
            return self.first
        if self.hinted is not None:
            return self.hinted.rewards, self.hinted.members
        ends = trunk_ends(self.tree)
        roots = [self.tree.nodes[self.tree.leaves[end]].root for end in ends]
        if self.stopped is not None:
            return self.stopped.outcomes(self.tree, self.scores.values[ends], roots)
        return self.scores.values[ends], [(root.group, root.index) for root in roots]

    @property
    def decoded(self) -> int:
        """Return the number of decoded samples."""
        compared = 0 if self.finished is None else self.finished.decoded
        foretold = 0 if self.stopped is None else len(self.stopped.nodes)
        hinted = 0 if self.hinted is None else self.hinted.decoded
        return 0 if self.stored else len(self.tree.leaves) + self.drafts + compared + foretold + hinted

    @property
    def counts(self) -> dict[str, int]:
        """Return the counts of cheap finishes, stopped chains, hints and a second stage for the metrics."""
        hinted = {} if self.hinted is None else {"reward/hinted": self.hinted.samples}
        parts = [each.counts for each in (self.finished, self.stopped) if each is not None]
        further = 0 if self.first is None else len(trunk_ends(self.tree)) - len(self.first[1])
        staged = {} if self.first is None else {"prompts/second_stage": further}
        return {key: count for part in (*parts, hinted, staged) for key, count in part.items()}

    def join(self, groups: Groups, further: Batch | None) -> Batch:
        """Return the batch with the trees of a second stage; None if this process has none. `groups` are of both stages."""
        both = replace(self, groups=groups, first=self.outcomes)
        if further is None:
            return both
        scores = (self.scores, further.scores)
        return replace(
            both,
            tree=replace_roots(self.tree, further.tree),
            scores=Scores(
                torch.cat([each.values for each in scores]),
                torch.cat([each.lost for each in scores]),
                sum(each.seconds for each in scores),
            ),
            previews=_append_previews(self.previews, further.previews, len(self.tree.nodes)),
            finished=_add_finished(self.finished, further.finished),
        )


def _append_previews(
    previews: Sequence[StatePreview], further: Sequence[StatePreview], nodes: int
) -> list[StatePreview]:
    """Return the previews of two stages; `nodes` is the number of nodes of the first."""
    before = Counter(each.root.group for each in previews)
    return [*previews] + [
        replace(
            each,
            node=each.node + nodes,
            parent=None if each.parent is None else each.parent + before[each.root.group],
        )
        for each in further
    ]


def _add_finished(one: Finished | None, other: Finished | None) -> Finished | None:
    """Return the statistics of two stages of an iteration, which have the same names of counts."""
    if one is None or other is None:
        return None
    counts = {name: count + other.counts[name] for name, count in one.counts.items()}
    pairs = None if one.pairs is None or other.pairs is None else [*one.pairs, *other.pairs]
    return Finished(counts, pairs, one.decoded + other.decoded)


@torch.no_grad()
def rollout(
    policy: Policy,
    plan: Plan,
    roots: Sequence[Root],
    *,
    rewards: Sequence[Reward],
    micro_batch: int,
    assignment: Assignment | None = None,
    gather: Gather = list,
    shard: DataShard = WHOLE,
    **growth: Any,
) -> tuple[Tree, Scores]:
    """Grow and score the trees of one iteration; return them as one tree, and the scores in the order of its leaves.

    If all rewards wait for other machines, a group is decoded and scored as soon as it has all its leaves, while the model
    samples the others. All calls are the same as otherwise. Arguments are those of `score_leaves` and of `walk`.
    """
    remote = are_remote(rewards)
    with PieceScoring(rewards, assignment, gather, shard=shard) as scoring:
        leaves = _Leaves(scoring, micro_batch, on_host=remote)

        def landed(tree: Tree, states: Mapping[int, State]) -> None:
            own = [node for node in states if tree.nodes[node].sigma == 0]
            growing = {tree.nodes[node].root.group for node in states if tree.nodes[node].sigma > 0}

            def decode(batch: Sequence[int], rows: Sequence[Row]) -> torch.Tensor | Films:
                return policy.decode(stack_states([states[own[leaf]] for leaf in batch]), rows)

            leaves.take(tree, own, decode, growing=growing)

        tree = walk(policy, plan, roots, micro_batch=micro_batch, landed=landed if remote else None, **growth)

        def decode(batch: Sequence[int], rows: Sequence[Row]) -> torch.Tensor | Films:
            return policy.decode(tuple(x[list(batch)] for x in tree.samples), rows)

        leaves.take(tree, tree.leaves, decode)
        return tree, leaves.in_order(scoring.scores())


@torch.no_grad()
def walk(
    policy: Policy,
    plan: Plan,
    roots: Sequence[Root],
    *,
    micro_batch: int,
    seed: int,
    iteration: int,
    keep_means: bool = False,
    keep_graphs: Collection[tuple[int, float]] = (),
    keep_shared: bool = False,
    evaluate: Evaluate | None = None,
    finish: Finish | None = None,
    gate: Gate | None = None,
    landed: Landed | None = None,
    start: State | None = None,
    address: str = "edge",
) -> Tree:
    """Grow the trees of one iteration, and return them as one; see `samplers.growth.grow`.

    Args:
        roots: roots of this process; their rows are `Row`s.
        seed, iteration: parts of every noise address, with the word `address` between them.
        start: states of the roots; None: the initial states that the policy draws.
        keep_shared: whether to keep the states of nodes with several children.
        evaluate: returns the velocity; None: the policy's.
        finish: takes several ODE steps at once where they lead only to a reward; None: such steps are taken one by one.
        gate: chooses which chains go on; it needs `finish` None. None: all.
        landed: is told of leaves while others grow; with `finish` it is not called.
    """
    growth: dict[str, Any] = {
        "start": start_roots(policy, roots, micro_batch) if start is None else start,
        "evaluate": evaluate or policy.velocity,
        "travel": policy.travel if evaluate is None else None,
        "noise": edge_noise(seed, iteration, address),
        "micro_batch": micro_batch,
        "keep_means": keep_means,
        "keep_graphs": keep_graphs,
        "keep_shared": keep_shared,
    }
    if finish is not None:
        return grow_and_finish(plan, policy.sigmas, roots, finish=finish, **growth)
    return grow(plan, policy.sigmas, roots, gate=gate, landed=landed, **growth)


def start_roots(policy: Policy, roots: Sequence[Root], micro_batch: int) -> State:
    """Return the initial states (R, ...) of roots, in calls of at most `micro_batch` rows."""
    parts = [policy.start(batch) for batch in batched([root.row for root in roots], micro_batch)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def edge_noise(seed: int, iteration: int, word: str = "edge") -> Noise:
    """Return the noise source for the edges of an iteration's trees; each `word` has its own."""
    return lambda shape, *address: noise.noise(shape, seed, word, iteration, *address)


@torch.no_grad()
def score_leaves(
    tree: Tree,
    decode: Decode,
    rewards: Sequence[Reward],
    micro_batch: int,
    *,
    assignment: Assignment | None = None,
    gather: Gather = list,
    shard: DataShard = WHOLE,
) -> Scores:
    """Decode the leaves of a tree, score them, and return the scores in the order of the leaves.

    `decode` returns the samples of at most `micro_batch` leaves, from their indices in `tree.leaves` and their rows.
    """
    with PieceScoring(rewards, assignment, gather, shard=shard) as scoring:
        leaves = _Leaves(scoring, micro_batch)
        leaves.take(tree, tree.leaves, decode)
        return leaves.in_order(scoring.scores())


class _Leaves:
    """The leaves of a tree on their way to the rewards: group by group, in the order of each group's first leaf.

    Groups share full calls of the decoder. With `on_host` decoded samples wait for their scores in host memory.
    """

    def __init__(self, scoring: PieceScoring, micro_batch: int, *, on_host: bool = False):
        self._scoring, self._micro_batch, self._on_host = scoring, micro_batch, on_host
        self._order: list[int] = []  # leaves of groups that are complete
        self._decoded = 0  # number of leaves of `_order` that are decoded
        self._groups: deque[tuple[int, list[int]]] = deque()  # complete groups with their leaves, not scored yet
        self._parts: list[Any] = []  # decoded samples of these groups

    def take(self, tree: Tree, leaves: Sequence[int], decode: Decode, *, growing: Container[int] = ()) -> None:
        """Decode and begin to score the groups of the nodes `leaves`, up to the first group that is still `growing`.

        Without `growing` these are all leaves. Earlier calls had a part of `leaves`, in the same order.
        """
        by_group, taken = defaultdict(list), set(self._order)
        for index, leaf in enumerate(leaves):
            if index not in taken:
                by_group[tree.nodes[leaf].root.group].append(index)
        for group, indices in by_group.items():
            if group in growing:
                break
            indices.sort(key=lambda index: tree.nodes[leaves[index]].path)  # whatever the assignment to processes
            self._order += indices
            self._groups.append((group, indices))
        ready = len(self._order) - self._decoded
        if growing:
            ready -= ready % self._micro_batch
        if not ready:
            return
        with phase("decoding", ready) as decoding:
            for batch in batched(self._order[self._decoded : self._decoded + ready], self._micro_batch):
                self._parts.append(decode(batch, [tree.nodes[leaves[leaf]].root.row for leaf in batch]))
                self._decoded += len(batch)
                decoding.advance(len(batch))
                self._score(tree, leaves)

    def in_order(self, scores: Scores) -> Scores:
        """Return scores of the groups in the order of the leaves."""
        order = torch.tensor(self._order).argsort()
        return Scores(scores.values[order], scores.lost[order], scores.seconds)

    def _score(self, tree: Tree, leaves: Sequence[int]) -> None:
        """Begin to score the groups whose samples are all decoded."""
        while self._groups and sum(map(len, self._parts)) >= len(self._groups[0][1]):
            group, indices = self._groups.popleft()
            samples = self._parts[0] if len(self._parts) == 1 else join_samples(self._parts)
            self._parts = [rest] if len(rest := samples[len(indices) :]) else []
            own, samples = [tree.nodes[leaves[index]] for index in indices], samples[: len(indices)]
            if self._on_host:
                samples = samples.cpu()
            self._scoring.add(Piece(group, [node.path for node in own], samples, [node.root.row for node in own]))
