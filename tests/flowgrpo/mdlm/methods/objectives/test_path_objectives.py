"""Ratios of all that was written up to a token: sums, losses and gradients by hand, and what is refused."""

import math

import pytest
import torch
from toy_predictor import PLANS, Toy, answers

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.mdlm.methods.backward import backward
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate
from flowgrpo.mdlm.methods.objectives.objective import LossInputs, TokenRatio
from flowgrpo.mdlm.methods.objectives.path_objectives import PrefixRatio, prefixes


def inputs(gap, order, advantage, scored=None):
    """One answer whose tokens, written at the steps `order`, have these log ratios; and the log-probabilities."""
    order = torch.tensor([order])
    count = int(order.max()) + 1
    scored = torch.ones_like(order, dtype=torch.bool) if scored is None else torch.tensor([scored])
    weight = ((order == torch.arange(count)[:, None, None]) & scored).double()
    new = (weight * (torch.tensor([gap], dtype=torch.float64) - 1.5)).requires_grad_()
    terms = LossInputs(
        new=new,
        old=-1.5 * weight,
        reference=None,
        weight=weight,
        view_weight=torch.full((count,), 1 / count),
        length=scored.sum(1),
        advantage=torch.tensor([advantage], dtype=torch.float64),
        group=torch.zeros(1, dtype=torch.long),
        rank=torch.zeros(1),
        token_weight=torch.ones(order.shape, dtype=torch.float64),
        active_views=torch.ones(count, 1, dtype=torch.bool),
        order=order,
    )
    return terms, new


def told(objective, *case):
    """The loss, its derivative in each token's log-probability, and which tokens are said to be stopped."""
    terms, new = inputs(*case)
    loss = objective.loss(terms)
    (slope,) = torch.autograd.grad(loss, new)
    return loss.item(), slope.sum(0)[0].tolist(), objective.stopped(terms)[0].tolist()


def test_tokens_of_a_step_have_all_of_it_and_of_what_came_before():
    """Whatever the places of the tokens; one that is not scored is in no sum."""
    gaps, order = torch.tensor([[0.1, 0.2, 0.4, 0.8, 1.6]]), torch.tensor([[2, 0, 1, 0, 2]])
    scored = torch.tensor([[True, True, True, True, False]])
    sums, counts = prefixes(gaps, scored, order)
    assert sums[0, :4].tolist() == pytest.approx([1.5, 1.0, 1.4, 1.0])
    assert counts[0, :4].tolist() == [4, 2, 3, 2]


def test_a_token_s_log_ratio_is_cut_before_it_is_summed():
    sums, _ = prefixes(torch.tensor([[1e4, -1e4, -1e4]]), torch.ones(1, 3, dtype=torch.bool), torch.arange(3)[None])
    assert sums[0].tolist() == [20.0, 0.0, -20.0]


LOW, HIGH, DUAL = 0.1, 0.2, 1.5
BOUNDED = PrefixRatio(clip_range=[LOW, HIGH], dual=DUAL)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_from_left_to_right_it_is_the_released_loss_of_a_text(advantage):
    """Its formulas once more, token by token; each log ratio has the gradient of its own token alone."""
    gaps = [0.15, 0.1, -0.9, 0.3, 0.05, 1.2]
    loss, slopes, stopped = told(BOUNDED, gaps, list(range(6)), advantage)
    expected = []
    for t in range(1, 7):
        log_ratio = sum(gaps[:t])
        bound = min(max(log_ratio, -LOW * t**0.5), HIGH * t**0.5)
        worst = max(-advantage * math.exp(log_ratio), -advantage * math.exp(bound))
        moves = worst == -advantage * math.exp(log_ratio)
        cap = -advantage * math.exp(DUAL * HIGH * t**0.5)
        if advantage < 0 and worst > cap:
            worst, moves = cap, False
        expected.append((worst, worst if moves else 0.0, not moves))
    assert loss == pytest.approx(sum(value for value, _, _ in expected))
    assert slopes == pytest.approx([slope for _, slope, _ in expected])
    assert stopped == [is_stopped for _, _, is_stopped in expected]
    assert len(set(stopped)) == 2


def test_an_answer_of_one_token_has_its_own_ratio():
    ours = PrefixRatio(clip_range=[-math.log(0.8), math.log(1.3)], dual=None)
    for gap in (-0.5, -0.1, 0.0, 0.1, 0.5):
        for advantage in (1.0, -1.0):
            plain = told(TokenRatio(clip_range=[0.2, 0.3]), [gap], [0], advantage)
            assert told(ours, [gap], [0], advantage)[0] == pytest.approx(plain[0])
            assert told(ours, [gap], [0], advantage)[1:] == (pytest.approx(plain[1]), plain[2])


def test_a_token_that_is_not_scored_has_no_part():
    whole = told(BOUNDED, [0.02, 0.01, -0.04], [0, 1, 2], 1.0)
    more = told(BOUNDED, [0.02, 5.0, 0.01, -0.04], [0, 1, 2, 3], 1.0, [True, False, True, True])
    assert more[0] == pytest.approx(whole[0])
    assert more[1] == pytest.approx([whole[1][0], 0.0, *whole[1][1:]])


@pytest.mark.parametrize("plan", ["autoregressive", "trajectory", "shrunk"])
def test_without_a_move_every_ratio_is_1_whatever_the_bounds(plan):
    """So that the gradient is that of token ratios, and nothing is stopped."""
    given, toy, found = answers(rows=4), Toy(), []
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.7], dtype=torch.float64)
    chosen = PLANS[plan](given)
    for objective in (PrefixRatio(clip_range=1e-12), TokenRatio(clip_range=0.2)):
        toy.zero_grad()
        inputs = {"old": estimate(toy, given, chosen, 100).each, "reference": None, "micro_batch": 3}
        inputs |= {
            "advantage": advantage,
            "group": torch.zeros(4),
            "rank": torch.zeros(4),
            "token_weight": given.scored / given.scored.sum(),
        }
        outcome = backward(toy, given, chosen, objective=objective, **inputs)
        assert not objective.stopped(outcome.inputs).any()
        found.append((outcome.loss, torch.cat([p.grad.flatten() for p in toy.parameters()])))
    assert found[0][0] == pytest.approx(found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


def text(**algorithm):
    return config.validate({"kind": "mdlm", "model": {"path": "digits"}, "algorithm": algorithm})


UNORDERED = r"^algorithm\.likelihood: prefix_ratio needs the order .* autoregressive or"
REFUSED = dict.fromkeys(("diffu_grpo", "coupled_grpo", "gdpo"), UNORDERED)
REFUSED["co_grpo"] = r"^algorithm\.schedule: it needs a ratio"  # its numbers have no prefix


@pytest.mark.parametrize(("preset", "said"), REFUSED.items())
def test_a_method_without_an_order_is_refused(preset, said):
    with pytest.raises(InputError, match=said):
        text(preset=preset, objective="prefix_ratio")


@pytest.mark.parametrize("preset", ["just_grpo", "cj_grpo", "trace_rl"])
def test_a_likelihood_along_an_order_is_taken(preset):
    assert text(preset=preset, objective="prefix_ratio").algorithm.objective.clip_range == [0.025, 0.05]
