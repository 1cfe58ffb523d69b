"""Log-probabilities of answers from their views, in calls of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from flowgrpo.mdlm.decoding.tokens.logit_chunks import fine, portions
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

Tensor = torch.Tensor
TokenScore = Callable[[Tensor, Tensor], Tensor]  # of logits (N, V) and tokens (N,), a number for each token (N,)


@dataclass(frozen=True)
class Call:
    """N evaluations in one call of the model: evaluation i is view `views[i]` of row `rows[i]`, both (N,) int64."""

    views: Tensor
    rows: Tensor


Measure = Callable[
    [Call, Tensor], Tensor
]  # of a call and the logits (M, V) of its scored tokens, a number of each (M,)


@dataclass(frozen=True)
class LogProb:
    """An estimate of the log-probabilities of B answers from n views."""

    each: Tensor  # (n, B, L) log p of each token in each view that scores it, 0 elsewhere; at least float32
    weight: Tensor  # (n, B, L) of `Views`
    measured: Tensor | None = (
        None  # (n, B, L) a `Measure` of each view's prediction of a token that it scores, 0 elsewhere
    )

    @property
    def token_measure(self) -> Tensor:
        """(B, L): the measure of each token, a mean over the views that score it by their weights; 0 where none does."""
        assert self.measured is not None, "it was not asked for"
        return (self.weight * self.measured).sum(0) / self.weight.sum(0).where((self.weight > 0).any(0), 1.0)

    @property
    def token(self) -> Tensor:
        """(B, L): weighted log p of each token, summed over the views."""
        return (self.weight * self.each).sum(0)

    @property
    def seq(self) -> Tensor:
        """(B,): log-probability of the answer."""
        return (self.weight * self.each).sum((0, 2))


def calls(views: Views, micro_batch: int, separable: bool = False) -> Iterator[list[Call]]:
    """Yield groups of calls of at most `micro_batch` evaluations; views that score nothing are left out.

    Pass `separable` if the objective is a sum over views: views of all answers then fill call after call, each a group of
    its own. Otherwise all views of an answer lie in one group: answers that need several calls form the first group
    together; the others share calls, and each of these calls is a group.

    Use the same calls for all policies (current, old, reference), so that estimates differ by the policies' weights alone.
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
    for answers in together:
        some = torch.isin(rows, torch.tensor(answers, device=rows.device))
        yield [Call(chosen[some], rows[some])]


def _cut(chosen: Tensor, rows: Tensor, micro_batch: int) -> list[Call]:
    return [
        Call(*pair) for pair in zip(chosen.split(micro_batch), rows.split(micro_batch), strict=True) if len(pair[0])
    ]


def log_probs(
    predictor: MaskPredictor, answers: Answers, views: Views, call: Call, *, score: TokenScore | None = None
) -> Tensor:
    """Return log p (N, L) of the tokens scored in each evaluation of a call, 0 elsewhere; with gradient unless disabled.

    The softmax is over the model's own logits, without temperature, in float32 or finer. `score` takes the place of log p.
    """
    scored, logits, tokens = predictions(predictor, answers, views, call)
    return _placed((score or _Picked.apply)(logits, tokens), scored)


def predictions(predictor: MaskPredictor, answers: Answers, views: Views, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the M tokens scored in a call of N evaluations: a mask (N, L), their logits (M, V) and their ids (M,)."""
    ids = answers.ids[call.rows]
    scored = views.scored[call.views, call.rows]
    where = torch.nn.functional.pad(scored, (answers.prompt_length, 0))
    seen = ids.masked_fill(views.hidden[call.views, call.rows], predictor.mask_id)
    mask, start = answers.attention_mask[call.rows], answers.prompt_length
    clean = {} if answers.block_size is None else {"clean": torch.cat([seen[:, :start], ids[:, start:]], dim=1)}
    return scored, predictor.logits_at(seen, mask, where, **clean), ids[where]


def _placed(values: Tensor, scored: Tensor) -> Tensor:
    """Put values (M,) of scored tokens to their places (N, L)."""
    return values.new_zeros(scored.shape).masked_scatter(scored, values)


class _Picked(torch.autograd.Function):
    """Log p (N,) of tokens (N,) under logits (N, V), in float32 or finer, one portion of rows at a time.

    For logits in half precision autograd would keep a float32 table (N, V) as well; this function keeps the logits alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        parts = [fine(logits[rows]).log_softmax(-1).gather(-1, tokens[rows, None])[:, 0] for rows in portions(logits)]
        return torch.cat(parts) if parts else fine(logits[:, 0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        logits, tokens = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in portions(logits):
            by = slope[rows, None]
            gradient[rows] = fine(logits[rows]).softmax(-1).mul_(-by).scatter_add_(-1, tokens[rows, None], by)
        return gradient, None


def scatter(results: Sequence[tuple[Call, Tensor]], weight: Tensor) -> Tensor:
    """Scatter the results (N, L) of calls into the shape (n, B, L) of `weight`; 0 where there was no call."""
    each = results[0][1].new_zeros(weight.shape) if results else torch.zeros_like(weight)
    for call, values in results:
        each[call.views, call.rows] = values
    return each


@torch.no_grad()
def estimate(
    predictor: MaskPredictor,
    answers: Answers,
    views: Views,
    micro_batch: int,
    *,
    separable: bool = False,
    measure: Measure | None = None,
) -> LogProb:
    """Return the estimate without gradient, for the old policy and the reference.

    `micro_batch` and `separable` must be those of the update, so that both make the same calls; see `calls`. `measure` is
    taken of the predictions of the same calls.
    """
    results, measured = list[tuple[Call, Tensor]](), list[tuple[Call, Tensor]]()
    for call in (call for group in calls(views, micro_batch, separable) for call in group):
        scored, logits, tokens = predictions(predictor, answers, views, call)
        results.append((call, _placed(_Picked.apply(logits, tokens), scored)))
        if measure is not None:
            measured.append((call, _placed(measure(call, logits), scored)))
    of_views = None if measure is None else scatter(measured, views.weight)
    return LogProb(scatter(results, views.weight), views.weight, of_views)
