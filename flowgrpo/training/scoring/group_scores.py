"""Scoring of an iteration's samples: group by group, in threads, while the next groups are sampled.

A group-wise reward gets all samples of a group at once. If several processes have samples of the group, the first of
them collects and scores all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from flowgrpo.data.prompts import Row
from flowgrpo.training.distributed.assignment import Assignment
from flowgrpo.training.distributed.data_shard import WHOLE, DataShard
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.scorer import Samples, Scorer, Scores
from rewards import Reward
from rewards.audio import Films, join_samples

WAITING = 4  # number of groups that may wait for their scores, so that a slow reward does not fill the memory
Gather = Callable[[list[Any]], list[Any]]  # returns the objects of all processes, given those of this one


@dataclass(frozen=True)
class Piece:
    """The samples of one group on this process."""

    group: int  # index of the group
    places: Sequence[Any]  # sort keys of the samples, which order all samples of the group over all processes
    samples: Samples  # in the order of `places`
    rows: Sequence[Row]  # prompt and columns of each sample


def are_remote(rewards: Sequence[Reward]) -> bool:
    """Return whether all rewards wait for other machines, so that they take nothing from a model that samples."""
    return bool(rewards) and all(reward.remote for reward in rewards)


class PieceScoring:
    """A context that scores pieces of an iteration in threads, from the moment that they are added.

    Args:
        assignment: the assignment of samples to processes; None if no group is divided among processes.
        gather: gathers objects over processes; by default over this process alone.
        shard: the data shard of the pieces. The shard's first process scores them and broadcasts the scores to the rest.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        assignment: Assignment | None = None,
        gather: Gather = list,
        *,
        shard: DataShard = WHOLE,
    ):
        self._rewards, self._assignment, self._gather, self._shard = rewards, assignment, gather, shard
        compared = any(reward.group_wise for reward in rewards)
        self._divided = assignment.divided if assignment is not None and compared else {}
        self._scorer = Scorer(rewards)
        self._pending: deque[Callable[[], Scores]] = deque()
        self._divided_pieces: dict[int, Piece] = {}
        self._groups: list[int] = []
        self._scored: list[Scores] = []

    def __enter__(self) -> PieceScoring:
        self._scorer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._scorer.__exit__(*error)

    def add(self, piece: Piece) -> None:
        """Begin to score a piece; wait for the oldest one if `WAITING` pieces are not scored yet."""
        if not self._shard.leads:  # it only makes the samples: the processes of a shard call the network together
            return
        if len(self._pending) == WAITING:
            self._scored.append(self._pending.popleft()())
        self._groups.append(piece.group)
        asked = None
        if piece.group in self._divided:
            self._divided_pieces[piece.group] = _on_host(piece)
            asked = [not reward.group_wise for reward in self._rewards]
        self._pending.append(self._scorer.submit(piece.samples, piece.rows, asked=asked))

    def scores(self) -> Scores:
        """Wait for the scores and return them in the order of the pieces; all processes call this together."""
        if not self._shard.leads:
            for _ in range(2 if self._divided else 0):  # join the gathers of the first process
                self._gather([])
            return self._shard.broadcast(None)
        seconds = 0.0  # of group-wise rewards on divided groups
        with phase("rewards"):
            self._scored += [wait() for wait in self._pending]
            by_group = dict(zip(self._groups, self._scored, strict=True))
            if self._assignment is not None and self._divided:
                finished, seconds = _score_divided(
                    self._rewards,
                    by_group,
                    self._divided_pieces,
                    assignment=self._assignment,
                    gather=self._gather,
                    shard=self._shard,
                )
                by_group |= finished
        # An early stop may leave a process without any sample.
        nothing = Scores(torch.empty(0, len(self._rewards), dtype=torch.float64), torch.empty(0, dtype=torch.bool), 0.0)
        every = [nothing, *by_group.values()]
        return self._shard.broadcast(
            Scores(
                torch.cat([each.values for each in every]),
                torch.cat([each.lost for each in every]),
                sum(each.seconds for each in every) + seconds,
            )
        )


def score_pieces(
    rewards: Sequence[Reward],
    pieces: Iterable[Piece],
    assignment: Assignment | None = None,
    gather: Gather = list,
    *,
    shard: DataShard = WHOLE,
) -> Scores:
    """Return the scores of this process's samples, in the order of `pieces`, one for each of its groups.

    A piece is scored while the iterator samples the next ones; for the other arguments see `PieceScoring`.
    """
    with PieceScoring(rewards, assignment, gather, shard=shard) as scoring:
        for piece in pieces:
            scoring.add(piece)
        return scoring.scores()


def _score_divided(
    rewards: Sequence[Reward],
    scored: dict[int, Scores],
    pieces: dict[int, Piece],
    *,
    assignment: Assignment,
    gather: Gather,
    shard: DataShard,
) -> tuple[dict[int, Scores], float]:
    """Apply the group-wise rewards to groups with samples on several processes.

    Return the scores of `pieces` by all rewards, and the seconds of the group-wise ones. `pieces` are this process's
    pieces of such groups, `scored` their scores by the other rewards, both by group.
    """
    gather([])  # wait until all processes have finished their network calls, since the next messages are pairwise
    whole_groups = {
        group: _collect_group(group, pieces, assignment, shard) for group in assignment.divided if group in pieces
    }
    asked = [reward.group_wise for reward in rewards]
    results: dict[tuple[int, Hashable], tuple[list[float], bool]] = {}
    seconds = 0.0
    with Scorer(rewards) as scorer:
        for whole in whole_groups.values():
            if whole is not None:
                scores = scorer.submit(whole.samples, whole.rows, asked=asked)()
                seconds += scores.seconds
                values = zip(scores.values.tolist(), scores.lost.tolist(), strict=True)
                results |= {(whole.group, place): each for place, each in zip(whole.places, values, strict=True)}
    all_results = {key: each for process in gather([results]) for key, each in process.items()}
    finished, columns = {}, torch.tensor(asked)
    for group, piece in pieces.items():
        group_wise, others = [all_results[group, place] for place in piece.places], scored[group]
        lost = others.lost | torch.tensor([lost for _, lost in group_wise])
        values = others.values.where(~columns, torch.tensor([values for values, _ in group_wise], dtype=torch.float64))
        finished[group] = Scores(values.masked_fill(lost[:, None], torch.nan), lost, others.seconds)
    return finished, seconds


def _collect_group(group: int, pieces: dict[int, Piece], assignment: Assignment, shard: DataShard) -> Piece | None:
    """Return a whole group on the first process that has samples of it; the others send theirs and return None."""
    home, *others = assignment.divided[group]
    if assignment.process != home:
        sent = [(pieces[group].places, pieces[group].samples)]
        distributed.send_object_list(sent, dst=shard.first_of(home))
        return None
    piece = pieces[group]
    every = list(zip(piece.places, piece.samples, strict=True))
    for other in others:
        every += zip(*_receive(shard.first_of(other)), strict=True)
    every.sort(key=lambda each: each[0])
    samples = [sample for _, sample in every]
    if isinstance(piece.samples, torch.Tensor | Films):
        samples = join_samples([sample[None] for sample in samples])
    return Piece(group, [place for place, _ in every], samples, [*piece.rows[:1]] * len(every))


def _receive(process: int) -> Any:
    received: list[Any] = [None]
    distributed.recv_object_list(received, src=process)
    return received[0]


def _on_host(piece: Piece) -> Piece:
    samples = piece.samples.cpu() if isinstance(piece.samples, torch.Tensor | Films) else piece.samples
    return Piece(piece.group, piece.places, samples, piece.rows)
