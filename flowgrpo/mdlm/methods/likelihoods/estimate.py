"""Log-probabilities of answers from their views, in calls of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from flowgrpo.mdlm.decoding.tokens.logit_chunks import portions
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views

Tensor = torch.Tensor


class Predictor(Protocol):
    """A model that predicts masked tokens.

    Attributes:
        mask_id: the token that hides another.
        evaluations: rows it has been called with so far.
    """

    mask_id: int
    evaluations: int

    def logits_at(self, ids: Tensor, attention_mask: Tensor, where: Tensor) -> Tensor:
        """Logits (N, V) of the N tokens at `where` (B, T) bool, row by row, of ids (B, T) int64 under a mask (B, T) bool.

        They are -inf for the mask token. A block-causal model is given `clean` (B, T) too, what its blocks see of earlier
        ones.
        """


@dataclass(frozen=True)
class Call:
    """N evaluations, a view of a row each, that the model makes at once.

    Attributes:
        views, rows: (N,) int64 which.
    """

    views: Tensor
    rows: Tensor


@dataclass(frozen=True)
class LogProb:
    """An estimate and what it is made of.

    Attributes:
        each: (n, B, L) log p of each token in each view that scores it, 0 elsewhere; at least float32.
        weight: (n, B, L), of `Views`.
    """

    each: Tensor
    weight: Tensor

    @property
    def token(self) -> Tensor:
        """(B, L): sum over the views."""
        return (self.weight * self.each).sum(0)

    @property
    def views(self) -> Tensor:
        """(n, B): what each view adds to the answer's log-probability."""
        return (self.weight * self.each).sum(2)

    @property
    def seq(self) -> Tensor:
        """(B,): log-probability of the answer."""
        return (self.weight * self.each).sum((0, 2))


def calls(views: Views, micro_batch: int, separable: bool = False) -> Iterator[list[Call]]:
    """All evaluations that score something, in calls of at most `micro_batch`, listed by the answers they complete.

    Where the objective is a sum over views, views of all answers fill call after call, each in a list of its own: only the
    last one may have room. Otherwise an answer's views belong together. One whose views fit a call goes into the first
    that has room for them; those that need several calls fill them together, in a single list, the first.

    The estimates of all policies are to be cut alike, for then nothing but the policies differs.

    Args:
        separable: whether the objective is such a sum, see `flowgrpo.mdlm.methods.objectives.objective`.
    """
    needed = views.scored.any(2).T  # (B, n)
    rows, chosen = needed.nonzero(as_tuple=True)  # row by row
    if separable:
        yield from ([call] for call in _cut(chosen, rows, micro_batch))
        return
    counts = needed.sum(1)
    long = (counts > micro_batch)[rows]
    if long.any():
        yield _cut(chosen[long], rows[long], micro_batch)
    together: list[list[int]] = []  # answers of a call
    room: list[int] = []
    for row, count in enumerate(counts.tolist()):
        if 0 < count <= micro_batch:
            into = next((i for i, left in enumerate(room) if count <= left), len(room))
            if into == len(room):
                together.append([])
                room.append(micro_batch)
            together[into].append(row)
            room[into] -= count
    for own in together:
        some = torch.isin(rows, torch.tensor(own, device=rows.device))
        yield [Call(chosen[some], rows[some])]


def _cut(chosen: Tensor, rows: Tensor, micro_batch: int) -> list[Call]:
    return [
        Call(*pair) for pair in zip(chosen.split(micro_batch), rows.split(micro_batch), strict=True) if len(pair[0])
    ]


def log_probs(predictor: Predictor, answers: Answers, views: Views, call: Call) -> Tensor:
    """Log p (N, L) of the tokens scored in each evaluation of a call, 0 elsewhere; with gradient where that is on.

    The softmax is of the model's own logits, without temperature, and in float32 or better.
    """
    ids = answers.ids[call.rows]
    scored = views.scored[call.views, call.rows]
    where = torch.nn.functional.pad(scored, (answers.prompt_length, 0))
    seen = ids.masked_fill(views.hidden[call.views, call.rows], predictor.mask_id)
    mask, start = answers.attention_mask[call.rows], answers.prompt_length
    known = {} if answers.block_size is None else {"clean": torch.cat([seen[:, :start], ids[:, start:]], dim=1)}
    found = _Picked.apply(predictor.logits_at(seen, mask, where, **known), ids[where])
    return found.new_zeros(scored.shape).masked_scatter(scored, found)


class _Picked(torch.autograd.Function):
    """Log p (N,) of tokens (N,) under logits (N, V), in float32 or finer, of which no more than a portion is at once.

    Autograd would keep all of them, and of half precision the logits beside; here these alone are kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        found = [_fine(logits[rows]).log_softmax(-1).gather(-1, tokens[rows, None])[:, 0] for rows in portions(logits)]
        return torch.cat(found) if found else _fine(logits[:, 0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        logits, tokens = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in portions(logits):
            by = slope[rows, None]
            gradient[rows] = _fine(logits[rows]).softmax(-1).mul_(-by).scatter_add_(-1, tokens[rows, None], by)
        return gradient, None


def _fine(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def placed(found: Sequence[tuple[Call, Tensor]], weight: Tensor) -> Tensor:
    """What calls have found (N, L) in its places (n, B, L), the shape of `weight`; 0 where there was no call."""
    each = found[0][1].new_zeros(weight.shape) if found else torch.zeros_like(weight)
    for call, values in found:
        each[call.views, call.rows] = values
    return each


@torch.no_grad()
def estimate(
    predictor: Predictor, answers: Answers, views: Views, micro_batch: int, *, separable: bool = False
) -> LogProb:
    """The estimate without gradient, as the old policy and the reference need it.

    Args:
        micro_batch: evaluations in one call of the model; give the update the same.
        separable: whether the update's objective is a sum over views, so that both cut alike; see `calls`.
    """
    listed = [call for group in calls(views, micro_batch, separable) for call in group]
    found = [(call, log_probs(predictor, answers, views, call)) for call in listed]
    return LogProb(placed(found, views.weight), views.weight)
