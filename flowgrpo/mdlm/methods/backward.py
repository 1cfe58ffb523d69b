"""The gradient of an objective for any number of views, in the memory of one call of the model.

The activations of a call take most of an update's memory. So evaluations run a few at a time:

 - If the objective is a sum over views, calls are filled with views of any row, and each call has its own backward pass.
   This holds for BGPO's bound, and for token ratios whose views score disjoint tokens.
 - If the objective couples the rows of a group, all rows are taken together.
 - Otherwise, rows whose evaluations fit one call take one call and one backward pass.
 - Rows that need several calls together take two passes. The first, without gradient, computes the log-probabilities l of
   all views and, by autograd on these few numbers, the slope of the loss in each. The second calls the model again and
   sends sum of slope * l backward. By the chain rule this is the exact gradient, for one more evaluation of each view.

The two passes see the same l only if the model is deterministic, without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, calls, log_probs, scatter
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.methods.objectives.objective import GivenInputs, LossInputs, Objective

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

Tensor = torch.Tensor
Send = Callable[[Tensor], object]
Pass = tuple[float, list[Tensor]]  # loss, and l of each call without gradient


@dataclass(frozen=True)
class Outcome:
    """The result of `backward`: the loss, summed over the rows, and its inputs without gradient, for metrics."""

    loss: float
    inputs: LossInputs


def backward(
    predictor: MaskPredictor,
    answers: Answers,
    views: Views,
    *,
    objective: Objective,
    advantage: Tensor,
    group: Tensor,
    rank: Tensor,
    token_weight: Tensor,
    old: Tensor | None,
    reference: Tensor | None,
    micro_batch: int,
    chosen: Tensor | None = None,
    pull: Tensor | None = None,
    send: Send = Tensor.backward,
) -> Outcome:
    """Add the gradient of the objective on some answers to the parameters' `grad`.

    Args:
        advantage: (B,) of the answers, or (B, L) of their tokens.
        group: (B,) int64 group of each answer.
        rank: (B,) reward by which the objective ranks good answers; 0 without one.
        token_weight: (B, L), see `flowgrpo.mdlm.methods.objectives.aggregation`.
        old: (n, B, L), `LogProb.each` of the policy that sampled the answers, on the same views. None if that is still the
            trained policy: no estimate is needed, and every ratio is 1.
        reference: the same of the reference; None if the objective needs none.
        micro_batch: evaluations of one call; only one call's graph is in memory at a time. Must be that of `estimate`.
        chosen: (B, L) bool tokens that the objective's `covariance` chose; None without one.
        pull: (B, L) weights of the objective's `distillation`; None without one.
        send: runs the backward pass of a loss; a caller may scale the loss for float16, or take turns with other processes.
    """
    everything = torch.ones(views.weight.shape[:2], dtype=torch.bool, device=views.weight.device)
    inputs = GivenInputs(
        old=old,
        reference=reference,
        weight=views.weight,
        view_weight=views.view_weight,
        length=answers.length,
        advantage=advantage,
        group=group,
        rank=rank,
        token_weight=token_weight,
        active_views=everything,
        order=views.first,
        chosen=chosen,
        pull=pull,
    )
    loss, results = 0.0, list[tuple[Call, Tensor]]()
    idle = ~views.scored.any(2)  # (n, B) views without an evaluation count once, with their row's first evaluation
    together = list(calls(views, micro_batch, objective.separable(views)))
    if objective.couples:
        together = [[call for each in together for call in each]]
    for some in together:
        rows = torch.cat([call.rows for call in some]).unique()
        local = [Call(call.views, torch.searchsorted(rows, call.rows)) for call in some]
        score = objective.token_score
        evaluate = [partial(log_probs, predictor, answers, views, call, score=score) for call in some]
        if len(some) == 1:
            active = idle[:, rows]
            idle[:, rows] = False
            active[local[0].views, local[0].rows] = True
            value, each = _one_pass(
                evaluate[0], local[0], inputs.of(rows), active=active, objective=objective, send=send
            )
        else:
            idle[:, rows] = False
            value, each = _two_passes(evaluate, local, inputs.of(rows), objective=objective, send=send)
        loss += value
        results += zip(some, each, strict=True)
    return Outcome(loss, inputs.at(scatter(results, views.weight), everything))


def _one_pass(
    evaluate: Callable[[], Tensor],
    call: Call,
    inputs: GivenInputs,
    *,
    active: Tensor,
    objective: Objective,
    send: Send,
) -> Pass:
    """Run one call and its backward pass; the loss includes the `active` views (n, B) bool of its rows."""
    each = evaluate()
    result = objective.loss(inputs.at(scatter([(call, each)], inputs.weight), active))
    send(result)
    return float(result.detach()), [each.detach()]


def _two_passes(
    evaluate: Sequence[Callable[[], Tensor]],
    group: Sequence[Call],
    inputs: GivenInputs,
    *,
    objective: Objective,
    send: Send,
) -> Pass:
    with torch.no_grad():
        results = [each() for each in evaluate]
    new = scatter(list(zip(group, results, strict=True)), inputs.weight).requires_grad_()
    result = objective.loss(inputs.at(new, inputs.active_views))
    (slope,) = torch.autograd.grad(result, new)
    for each, call in zip(evaluate, group, strict=True):
        send((each() * slope[call.views, call.rows]).sum())
    return float(result.detach()), results
