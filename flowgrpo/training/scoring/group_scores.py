"""The scores of an iteration's samples: group by group, in threads, while the next are made.

A reward that compares the samples of a group is given all of them at once: where several processes have a part of the group,
they send theirs to the first of them, which scores the whole.
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
from flowgrpo.training.distributed.data_share import WHOLE, DataShard
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.scorer import Samples, Scorer, Scores
from rewards import Reward

WAITING = 4  # groups that may wait for their scores, so that a slow reward does not fill the memory
Gather = Callable[[list[Any]], list[Any]]  # the objects of all processes, from those of this one


@dataclass(frozen=True)
class Piece:
    """What a process has of a group.

    Attributes:
        group: integer.
        places: of its samples, which order all samples of the group.
        samples: in the order of their places.
        rows: of each.
    """

    group: int
    places: Sequence[Any]
    samples: Samples
    rows: Sequence[Row]


def score_pieces(
    rewards: Sequence[Reward],
    pieces: Iterable[Piece],
    assignment: Assignment | None = None,
    gather: Gather = list,
    *,
    share: DataShard = WHOLE,
) -> Scores:
    """Scores of this process's samples, in the order of the pieces, which are scored while the next are made.

    Args:
        pieces: one of each of its groups.
        assignment: of which they are; None for groups that all lie here.
        gather: of the processes; by default of this one alone.
        share: of the data, of which the pieces are; the first process that works on it scores them, and tells the others.
    """
    divided = assignment.divided if assignment is not None and any(reward.group_wise for reward in rewards) else {}
    if not share.leads:
        for _ in pieces:  # made by all that work on the share, which call the network together
            pass
        for _ in range(2 if divided else 0):  # as often as the first process gathers
            gather([])
        return share.told(None)
    kept: dict[int, Piece] = {}
    groups: list[int] = []
    scored: list[Scores] = []
    seconds = 0.0  # of what is scored together
    with Scorer(rewards) as scorer:
        pending: deque[Callable[[], Scores]] = deque()
        for piece in pieces:
            if len(pending) == WAITING:
                scored.append(pending.popleft()())
            groups.append(piece.group)
            if piece.group in divided:
                kept[piece.group] = _on_host(piece)
                wait = scorer.submit(piece.samples, piece.rows, asked=[not reward.group_wise for reward in rewards])
            else:
                wait = scorer.submit(piece.samples, piece.rows)
            pending.append(wait)
        with phase("rewards"):
            scored += [wait() for wait in pending]
            by_group = dict(zip(groups, scored, strict=True))
            if assignment is not None and divided:
                finished, seconds = _scored_together(
                    rewards, by_group, kept, assignment=assignment, gather=gather, share=share
                )
                by_group |= finished
    every = by_group.values()
    return share.told(
        Scores(
            torch.cat([each.values for each in every]),
            torch.cat([each.lost for each in every]),
            sum(each.seconds for each in every) + seconds,
        )
    )


def _scored_together(
    rewards: Sequence[Reward],
    scored: dict[int, Scores],
    kept: dict[int, Piece],
    *,
    assignment: Assignment,
    gather: Gather,
    share: DataShard,
) -> tuple[dict[int, Scores], float]:
    """The scores of this process's parts of divided groups, with those of the rewards that compare whole groups.

    Beside them the seconds that these rewards took here.
    """
    gather([])  # all processes are through with their networks: what follows is between two of them
    whole = {group: _together(group, kept, assignment, share) for group in assignment.divided if group in kept}
    asked = [reward.group_wise for reward in rewards]
    told: dict[tuple[int, Hashable], tuple[list[float], bool]] = {}
    seconds = 0.0
    with Scorer(rewards) as scorer:
        for piece in whole.values():
            if piece is not None:
                found = scorer.submit(piece.samples, piece.rows, asked=asked)()
                seconds += found.seconds
                values = zip(found.values.tolist(), found.lost.tolist(), strict=True)
                told |= {(piece.group, place): each for place, each in zip(piece.places, values, strict=True)}
    everyone = {key: each for process in gather([told]) for key, each in process.items()}
    finished, columns = {}, torch.tensor(asked)
    for group, piece in kept.items():
        compared, own = [everyone[group, place] for place in piece.places], scored[group]
        lost = own.lost | torch.tensor([lost for _, lost in compared])
        values = own.values.where(~columns, torch.tensor([values for values, _ in compared], dtype=torch.float64))
        finished[group] = Scores(values.masked_fill(lost[:, None], torch.nan), lost, own.seconds)
    return finished, seconds


def _together(group: int, kept: dict[int, Piece], assignment: Assignment, share: DataShard) -> Piece | None:
    """A whole group on the first process that has a part of it; None on the others, which send theirs."""
    home, *others = assignment.divided[group]
    if assignment.process != home:
        sent = [(kept[group].places, kept[group].samples)]
        distributed.send_object_list(sent, dst=share.first_of(home))
        return None
    own = kept[group]
    every = list(zip(own.places, own.samples, strict=True))
    for other in others:
        every += zip(*_received(share.first_of(other)), strict=True)
    every.sort(key=lambda each: each[0])
    samples = [sample for _, sample in every]
    if isinstance(own.samples, torch.Tensor):
        samples = torch.stack(samples)
    return Piece(group, [place for place, _ in every], samples, [*own.rows[:1]] * len(every))


def _received(process: int) -> Any:
    received: list[Any] = [None]
    distributed.recv_object_list(received, src=process)
    return received[0]


def _on_host(piece: Piece) -> Piece:
    samples = piece.samples.cpu() if isinstance(piece.samples, torch.Tensor) else piece.samples
    return Piece(piece.group, piece.places, samples, piece.rows)
