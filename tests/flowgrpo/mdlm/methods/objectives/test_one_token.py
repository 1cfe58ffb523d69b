"""Learning from solutions, one token at a time: the gradient that reaches the model."""

import pytest
import torch
from toy_predictor import MASK, PLANS, Toy, answers

from flowgrpo.mdlm.methods.backward import backward
from flowgrpo.mdlm.methods.objectives.one_token import OneToken

WEIGHT = torch.rand(3, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def taught(toy, given, views, objective, advantage=None):
    """Gradient of the objective, three evaluations a call."""
    toy.zero_grad()
    outcome = backward(
        toy,
        given,
        views,
        objective=objective,
        advantage=torch.zeros(3) if advantage is None else advantage,
        group=torch.zeros(3),
        rank=torch.zeros(3),
        token_weight=WEIGHT,
        old=None,
        reference=None,
        micro_batch=3,
    )
    return outcome, [parameter.grad.clone() for parameter in toy.parameters()]


@pytest.mark.parametrize("plan", ["autoregressive", "exact_k", "all_blocks", "one_step"])
def test_each_scored_token_pulls_by_its_weight_in_its_view(plan):
    """Each view by itself, all draws of a token summed by their chances."""
    toy, given = Toy(), answers(rows=3)
    views, objective = PLANS[plan](given), OneToken(wrong=-0.3, temperature=1.7)
    toy.zero_grad()
    loss = 0.0
    for view, row, place in views.scored.nonzero().tolist():
        ids = given.ids[row].masked_fill(views.hidden[view, row], MASK)
        logits = toy.logits(ids[None], given.attention_mask[row][None])[0, given.prompt_length + place]
        reward = torch.full_like(logits, -0.3)
        reward[given.ids[row, given.prompt_length + place]] = 1.0
        drawn = (logits.detach() / 1.7).softmax(-1)
        pull = (drawn * reward * logits.log_softmax(-1).where(drawn > 0, 0.0)).sum()
        loss = loss - WEIGHT[row, place] * views.weight[view, row, place] * pull
    loss.backward()
    expected = [parameter.grad.clone() for parameter in toy.parameters()]
    before = toy.evaluations
    outcome, found = taught(toy, given, views, objective)
    assert toy.evaluations - before == int(views.scored.any(2).sum())  # one forward of each view
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert not objective.stopped(outcome.inputs).any()
    assert not objective.log_ratio(outcome.inputs).any()


def test_rewards_of_the_run_have_no_effect():
    toy, given = Toy(), answers(rows=3)
    views = PLANS["exact_k"](given)
    (_, one), (_, other) = (
        taught(toy, given, views, OneToken(), advantage) for advantage in (None, torch.tensor([1.0, -2.0, 0.5]))
    )
    assert all(map(torch.equal, one, other))
    assert OneToken().rewarded is False
