"""Shapes of a group's answers: independent answers, or trees of answers that share their first steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.rules.commit_rules import Committer
from flowgrpo.mdlm.decoding.tokens.branching import NO_BRANCHES, Branching, Place
from flowgrpo.schema.base import Choice
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.tree_credit import TreePaths
from flowgrpo.training.distributed.minibatches import count_roots

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.decode import Decoder, Rollout

PLACE = "algorithm.tree"


class Shape(Choice):
    """Options of every tree."""

    if TYPE_CHECKING:  # a field in one subclass, a property in the other

        @property
        @abstractmethod
        def splits(self) -> Sequence[float]:
            """The shares of a decode at which branches split."""

    @property
    @abstractmethod
    def leaves(self) -> int:
        """Number of answers that share their first step."""

    @abstractmethod
    def branching(self, decoder: Decoder) -> Branching:
        """Return where a decoder's answers branch. Raises InputError if they cannot branch there."""

    def roots(self, group_size: int) -> int:
        """Return the number of trees of a group; raise InputError if their leaves do not divide `group_size`."""
        return count_roots(group_size, self.leaves, f"leaves of a tree of {PLACE}")


class Chain(Shape):
    """Independent answers."""

    name: Literal["chain"] = "chain"

    @property
    def splits(self) -> Sequence[float]:
        """No split."""
        return ()

    @property
    @override
    def leaves(self) -> int:
        return 1

    @override
    def branching(self, decoder: Decoder) -> Branching:
        return NO_BRANCHES


class Branch(Shape):
    """Trees of answers: at each split every branch goes on as `factor` branches, which share all tokens before it.

    A group has as many trees as its size holds, each with a first branch of its own; all of them leave the prompt. The steps
    before a split are decoded once, and the first step behind it is evaluated once. Shared steps are also trained on once
    with the likelihood `trajectory` of `shrink` 1 or branch, credit of branches, the objective `token_ratio` and no KL of
    sequences; else in every answer. d-TreeRPO (arXiv 2512.09675) splits at equal parts of the steps, into four.
    """

    name: Literal["branch"] = "branch"
    factor: int = Field(4, ge=2)
    """Number of branches that a branch splits into."""
    splits: list[Annotated[float, Field(gt=0, lt=1)]] = Field([0.5], min_length=1)
    """Where branches split, ascending: shares of the decoder's steps; of its blocks if scores decide its steps, or with a
    cache. In a block-causal model blocks are counted from the prompt, so that the first one may be short."""
    entropy: float | None = Field(None, ge=0)
    """Split where the model is unsure: at those of `splits`, `depth` for each answer, where the mean entropy of the block's
    masked tokens is this or more, in nats; at the last ones if it never is. null: at all."""
    depth: int | None = Field(None, ge=1)
    """Number of splits on the way to each answer, with entropy; null: all of `splits`."""

    @model_validator(mode="after")
    def _agree(self) -> Branch:
        if self.entropy is None and self.depth is not None:
            raise InputError(f"{PLACE}.depth: without {PLACE}.entropy all splits are taken, leave it out")
        if self.entropy is not None and not 0 < (self.depth or 0) < len(self.splits):
            most = len(self.splits) - 1
            advice = ("give more of them", "take 1", f"take 1 to {most}")[min(most, 2)]
            raise InputError(f"{PLACE}.depth: entropy chooses some of {len(self.splits)} splits, {advice}")
        return self

    @property
    @override
    def leaves(self) -> int:
        return self.factor ** (self.depth or len(self.splits))

    @override
    def branching(self, decoder: Decoder) -> Branching:
        places = place_splits(decoder, self.splits, f"{PLACE}.splits")
        return Branching(self.factor, places, self.depth or len(self.splits), self.entropy)


@dataclass(frozen=True)
class Branches:
    """The branches of some answers; the answers of a tree are consecutive.

    A branch has the tokens that were committed between two splits. It is an edge of `paths`.
    """

    paths: TreePaths  # its trajectories are the answers
    edge: Tensor  # (B, S + 1) int64 edge of each answer before, between and after its S splits
    factor: int = 1  # number of branches that a branch splits into

    @property
    def origins(self) -> Tensor:
        """Canvas (nodes, 3) int64 that each branch leaves, the same on all processes: its group, tree and node there."""
        paths, starts = self.paths, dict[tuple[int, int], int]()
        canvases = []
        for node, (group, root, parent) in enumerate(zip(paths.group, paths.root, paths.parent, strict=True)):
            start = starts.setdefault((group, root), node)  # a tree's nodes are consecutive
            if parent is None or paths.step[node] == 1:  # all trees of a group leave its prompt
                canvases.append((group, -1, -1))
            else:
                canvases.append((group, root, parent - start))
        return torch.tensor(canvases, dtype=torch.long).reshape(-1, 3)

    def level(self, rollout: Rollout) -> Tensor:
        """Return the number (B, L) int64 of splits before each token of the answers; 0 for given tokens."""
        return (rollout.step_map[:, :, None] >= rollout.branched[:, None]).sum(2).to(self.edge.device)

    def log_prob(self, rollout: Rollout) -> Tensor:
        """Return the summed log-probability (nodes,) float64 of the tokens of each branch, as the decoder recorded it."""
        of_level = torch.zeros(self.edge.shape, dtype=torch.float64)
        of_level.scatter_add_(1, self.level(rollout), rollout.commit_logp.cpu())
        total = torch.zeros(len(self.paths.parent), dtype=torch.float64)
        return total.index_put((self.edge,), of_level)  # answers of a branch have the same sum


def grow(members: Sequence[tuple[int, int]], factor: int, splits: int) -> Branches:
    """Return the branches of answers in trees that split `splits` times, each time into `factor` branches.

    `members` (B,) are the group of each answer and its index there, whole trees in order.
    """
    parent: list[int | None] = []
    step, groups, roots = list[int](), list[int](), list[int]()
    known: dict[tuple[int, ...], int] = {}  # (group, level, index of the first answer) -> node
    lines = []
    for group, index in members:
        line: list[int] = []
        for level in range(splits + 2):  # level 0 is the start
            alike = factor ** (splits + 1 - max(level, 1))
            key = (group, level, index - index % alike)
            if key not in known:
                known[key] = len(parent)
                parent.append(line[-1] if line else None)
                step.append(level)
                groups.append(group)
                roots.append(index // factor**splits)
            line.append(known[key])
        lines.append(line[:0:-1])
    paths = TreePaths(parent=parent, step=step, group=groups, root=roots, lines=lines)
    edge = torch.tensor([line[::-1] for line in lines], dtype=torch.long).reshape(-1, splits + 1)
    return Branches(paths, edge, factor)


def place_splits(decoder: Decoder, shares: Sequence[float], place: str) -> tuple[Place, ...]:
    """Return the places at some shares of a decoder's steps; of its blocks if it is not paced or has a cache.

    What a cache has of finished blocks does not depend on how the block behind a split is filled.

    Raises InputError, naming `place`, if two shares are the same step or block, or one is the first.
    """
    frame, blocks, committer = decoder.frame, len(decoder.region.ends), decoder.committer
    assert isinstance(committer, Committer), "every committer of the tables is a Committer"
    of_block = None if decoder.cache else committer.block_steps(frame)
    parts, unit = (blocks, "blocks") if of_block is None else (frame.steps, "steps")
    at = [round(share * parts) for share in shares]
    if at != sorted({*at}) or not at[0] > 0 or at[-1] >= parts:
        nearest = f", take {' or '.join(f'{k / parts:g}' for k in sorted({1, parts // 2, parts - 1}))}" * (parts > 1)
        raise InputError(f"{place}: {list(shares)} are not ascending places inside a decode of {parts} {unit}{nearest}")
    if of_block is None:
        return tuple((number, 0) for number in at)
    return tuple(divmod(number, of_block) for number in at)
