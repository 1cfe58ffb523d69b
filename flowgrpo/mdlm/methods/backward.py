"""The gradient of an objective in the memory of one call, whatever the number of views.

What is kept of a call until its backward pass is most of the memory of an update. So evaluations are taken a few at a time:

 - objective a sum over views: calls are full, whosever views they hold, and each has its own backward pass (BGPO, and exact
   where views score disjoint tokens);
 - otherwise rows whose evaluations fit one call: one call, one backward pass;
 - and rows that need several, in two passes: the first, without gradient, gives l of all views and, by autograd on these few
   numbers, the slope of the loss in each; the second calls again and sends sum of slope * l backward. The chain rule: this
   is the exact gradient of any objective, for one more evaluation each.

Two passes see the same l only if the model is deterministic: no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, Predictor, calls, log_probs, placed
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.methods.objectives.objective import GivenInputs, LossInputs, Objective

Tensor = torch.Tensor
Send = Callable[[Tensor], object]


@dataclass(frozen=True)
class Outcome:
    """A loss whose gradient has been added to the parameters.

    Attributes:
        loss: summed over the rows.
        inputs: of all rows, without gradient, for what is measured: objective.log_ratio(inputs) and so on.
    """

    loss: float
    inputs: LossInputs


def backward(
    predictor: Predictor,
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
        old: (n, B, L), `LogProb.each` of the policy that made the answers, on the same views; None if this one still is it,
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
    loss, found = 0.0, list[tuple[Call, Tensor]]()
    idle = ~views.scored.any(2)  # (n, B) what needs no evaluation is counted once, with the first that its row needs
    for group in calls(views, micro_batch, objective.separable(views)):
        rows = torch.cat([call.rows for call in group]).unique()
        local = [Call(call.views, torch.searchsorted(rows, call.rows)) for call in group]
        evaluate = [partial(log_probs, predictor, answers, views, call) for call in group]
        own = inputs.of(rows)
        if len(group) == 1:
            active = idle[:, rows]
            idle[:, rows] = False
            active[local[0].views, local[0].rows] = True
            value, each = _one_pass(evaluate[0], local[0], inputs=own, active=active, objective=objective, send=send)
        else:
            idle[:, rows] = False
            value, each = _two_passes(evaluate, local, inputs=own, objective=objective, send=send)
        loss += value
        found += zip(group, each, strict=True)
    return Outcome(loss, inputs.at(placed(found, views.weight), everything))


Taken = tuple[float, list[Tensor]]  # loss, and l of each call without gradient


def _one_pass(
    evaluate: Callable[[], Tensor],
    local: Call,
    *,
    inputs: GivenInputs,
    active: Tensor,
    objective: Objective,
    send: Send,
) -> Taken:
    """One call, which has the loss of the `active` views (n, B) bool of its rows."""
    each = evaluate()
    result = objective.loss(inputs.at(placed([(local, each)], inputs.weight), active))
    send(result)
    return float(result.detach()), [each.detach()]


def _two_passes(
    evaluate: Sequence[Callable[[], Tensor]],
    local: list[Call],
    *,
    inputs: GivenInputs,
    objective: Objective,
    send: Send,
) -> Taken:
    """The slope of the loss in every l, then a pass with these as weights."""
    with torch.no_grad():
        found = [call() for call in evaluate]
    new = placed(list(zip(local, found, strict=True)), inputs.weight).requires_grad_()
    result = objective.loss(inputs.at(new, inputs.active_views))
    (slope,) = torch.autograd.grad(result, new)
    for call, index in zip(evaluate, local, strict=True):
        send((call() * slope[index.views, index.rows]).sum())
    return float(result.detach()), found
