"""Add the gradient of an objective in the memory of one call, for any number of views.

The activations of a call take most of an update's memory. So evaluations run a few at a time:

 - an objective that is a sum over views: calls are filled with views of any row, and each has its own backward pass (BGPO,
   and exact where views score disjoint tokens);
 - otherwise rows with evaluations that fit one call: one call, one backward pass;
 - rows that need several calls: two passes. The first, without gradient, computes l of all views and, by autograd on these
   few numbers, the slope of the loss in each; the second calls the model again and sends sum of slope * l backward. By the
   chain rule this is the exact gradient of any objective, for one more evaluation each.

Two passes see the same l only if the model is deterministic: no dropout.
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
    """A loss, summed over the rows, whose gradient is in the parameters; and its inputs without gradient, for metrics."""

    loss: float
    inputs: LossInputs


def backward(
    predictor: MaskPredictor,
    answers: Answers,
    views: Views,
    *,
    objective: Objective,
    advantage: Tensor,
    token_weight: Tensor,
    old: Tensor | None,
    reference: Tensor | None,
    micro_batch: int,
    send: Send = Tensor.backward,
) -> Outcome:
    """Add the gradient of the objective on some answers to the parameters' `grad`.

    Args:
        advantage: (B,) of the answers.
        token_weight: (B, L), see `flowgrpo.mdlm.methods.objectives.aggregation`.
        old: (n, B, L), `LogProb.each` of the policy that made the answers, on the same views; None if it is still this one,
            which saves an estimate and makes every ratio 1.
        reference: the same of the reference, None if the objective needs none.
        micro_batch: evaluations of one call, whose graph is alive at a time; as for `estimate`.
        send: the backward pass of a loss: scaled for float16, in turns with other processes.
    """
    everything = torch.ones(views.weight.shape[:2], dtype=torch.bool, device=views.weight.device)
    inputs = GivenInputs(
        old=old,
        reference=reference,
        weight=views.weight,
        view_weight=views.view_weight,
        length=answers.length,
        advantage=advantage,
        token_weight=token_weight,
        active_views=everything,
        order=views.first,
    )
    loss, results = 0.0, list[tuple[Call, Tensor]]()
    idle = ~views.scored.any(2)  # (n, B) views without an evaluation count once, with their row's first evaluation
    for group in calls(views, micro_batch, objective.separable(views)):
        rows = torch.cat([call.rows for call in group]).unique()
        local = [Call(call.views, torch.searchsorted(rows, call.rows)) for call in group]
        evaluate = [partial(log_probs, predictor, answers, views, call) for call in group]
        if len(group) == 1:
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
        results += zip(group, each, strict=True)
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
    """Run one call, with the loss of the `active` views (n, B) bool of its rows."""
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
