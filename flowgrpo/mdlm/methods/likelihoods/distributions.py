"""Numbers of the whole predictions of tokens: entropy, distance from the reference, spread over a group."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from flowgrpo.mdlm.decoding.tokens.logit_chunks import fine, portions
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, Measure, calls, predictions
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

Tensor = torch.Tensor
LIMIT = 11.0  # nats: the largest difference of log-probabilities that counts in `group_spread`


def entropies(call: Call, logits: Tensor) -> Tensor:
    """Return the entropy (M,) of the softmax of each row of logits (M, V), in nats: a `Measure`."""
    return _by_portions(lambda rows: torch.special.entr(fine(logits[rows]).softmax(-1)).sum(-1), logits)


def gated_distances(
    predictor: MaskPredictor, answers: Answers, views: Views, reference: Callable[[], AbstractContextManager[None]]
) -> Measure:
    """Return the `Measure` d H / ln V of predictions p over V tokens, with the reference's predictions q in the same views.

    d = sqrt(sum_v (sqrt(p_v) - sqrt(q_v))^2 / 2) is their Hellinger distance, H the entropy of p: a prediction that is far
    from the reference and still uncertain counts (DGPO, arXiv 2605.03327). `reference` returns a context in which the
    predictor is the reference. It is called once more in each call, so twice the logits of a call are in memory.
    """

    def measure(call: Call, logits: Tensor) -> Tensor:
        with reference():
            _, others, _ = predictions(predictor, answers, views, call)

        def distance(rows: slice) -> Tensor:
            p, q = (fine(each[rows]).softmax(-1) for each in (logits, others))
            hellinger = ((p.sqrt() - q.sqrt()).square().sum(-1) / 2).sqrt()
            return hellinger * torch.special.entr(p).sum(-1) / math.log(p.shape[-1])

        return _by_portions(distance, logits)

    return measure


@torch.no_grad()
def group_spread(
    predictor: MaskPredictor, answers: Answers, views: Views, *, group: Tensor, ended: Tensor, micro_batch: int
) -> Tensor:
    """Return for each scored token (B, L) how much the predictions at its place differ between the answers of its group.

    TW-GRPO (arXiv 2505.24718 and its code): with log-probabilities l_iv of answer i of G and their mean m_v, it is the mean
    over i of sum_v exp(m_v - l_iv) - (m_v - l_iv) - 1, with differences clamped at 11 nats. An answer that `ended` (B, L)
    before the place has a uniform prediction there. An answer of which no view scores the place is left out, and tokens that
    the model never predicts. NaN where an answer's own prediction is.

    `group` (B,) is the group of each answer. The host holds the log-probabilities of one group, G L V float32 numbers.
    """
    found = torch.zeros(answers.scored.shape)
    for number in group.unique():
        rows = (group == number).nonzero()[:, 0]
        own = views.of(rows)
        scored, table = own.scored.any(0).cpu(), _log_probs(predictor, answers.of(rows), own, micro_batch)
        over = ended[rows].cpu() & ~scored
        for place in range(scored.shape[1]):
            if not (here := scored[:, place]).any():
                continue
            logs = table[here, place].to(answers.ids.device)
            broken = logs.isnan().any(1)
            uniform = torch.zeros_like(logs[:1]).log_softmax(-1).expand(int(over[:, place].sum()), -1)
            spread = _spread(torch.cat([logs[~broken], uniform]))
            found[rows.cpu()[here], place] = spread.where(~broken, torch.nan).cpu()
    return found.to(answers.ids.device)


def _spread(logs: Tensor) -> Tensor:
    """Return the mean divergence () of G predictions from their mean log-probabilities; logs (G, V)."""
    mean = logs.mean(0)
    gap = (mean - logs).clamp(-LIMIT, LIMIT).where(~mean.isneginf(), 0.0)
    return (torch.expm1(gap) - gap).sum(-1).mean()


def _log_probs(predictor: MaskPredictor, answers: Answers, views: Views, micro_batch: int) -> Tensor:
    """Return log-probabilities (G, L, V), of each token a mean over the views that score it, by their weights; else 0."""
    weight = views.weight.cpu()
    share = weight / weight.sum(0).where((weight > 0).any(0), 1.0)
    table = torch.zeros(*weight.shape[1:], 0)
    for (call,) in calls(views, micro_batch, separable=True):
        scored, logits, _ = predictions(predictor, answers, views, call)
        if not table.shape[-1]:
            table = torch.zeros(*weight.shape[1:], logits.shape[-1])
        each = zip(call.views.tolist(), call.rows.tolist(), scored.cpu(), strict=True)
        for (view, row, places), part in zip(each, logits.split(scored.sum(1).tolist()), strict=True):
            table[row, places] += share[view, row, places, None] * fine(part).log_softmax(-1).cpu().float()
    return table


def _by_portions(number: Callable[[slice], Tensor], logits: Tensor) -> Tensor:
    """Return a number (M,) of each row of logits (M, V), found for one portion of rows at a time."""
    parts = [number(rows) for rows in portions(logits)]
    return torch.cat(parts) if parts else fine(logits[:, 0])
