import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_predictor import PLANS, Toy, answers

from flowgrpo.mdlm.methods.backward import backward
from flowgrpo.mdlm.methods.likelihoods import likelihood, masked_views
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate
from flowgrpo.mdlm.methods.objectives.bounds import LinearBound, Sandwich
from flowgrpo.mdlm.methods.objectives.objective import (
    KL,
    Divergence,
    LossInputs,
    SequenceRatio,
    TokenRatio,
)


def terms(gap, advantage, share=None, weight=None, reference=None):
    """Inputs of l whose gaps from the old ones are given, (n, B, L)."""
    gap = torch.as_tensor(gap, dtype=torch.float64)
    old = -torch.arange(1.0, 1 + gap.numel(), dtype=torch.float64).view_as(gap)
    weight = torch.ones_like(gap) if weight is None else torch.as_tensor(weight, dtype=torch.float64)
    return LossInputs(
        new=old + gap,
        old=old,
        reference=None if reference is None else old + gap - torch.as_tensor(reference, dtype=torch.float64),
        weight=weight,
        view_weight=torch.tensor(share or [1 / len(gap)] * len(gap), dtype=torch.float64),
        length=(weight > 0).any(0).sum(1),
        advantage=torch.tensor(advantage, dtype=torch.float64),
        group=torch.zeros(len(advantage), dtype=torch.long),
        rank=torch.zeros(len(advantage)),
        token_weight=torch.full(gap.shape[1:], 1 / gap[0].numel(), dtype=torch.float64),
        active_views=torch.ones(gap.shape[:2], dtype=torch.bool),
        order=(weight > 0).int().argmax(0),
    )


def test_token_ratios_by_hand():
    """Two views of one answer of two tokens: l is weighted and summed over views before exp."""
    case = terms([[[0.1, 0.0]], [[0.3, -0.9]]], [2.0], weight=[[[0.5, 0.0]], [[0.5, 1.0]]])
    loss = TokenRatio(clip_range=[0.2, 0.1]).loss(case)
    assert loss.item() == pytest.approx(-(2 * 1.1 + 2 * math.exp(-0.9)) / 2)
    assert TokenRatio(clip_range=[0.2, 0.1]).stopped(case).tolist() == [[True, False]]
    soft = TokenRatio(gate=[2.0, 3.0]).loss(case)
    expected = [-2 * 4 / 2 / (1 + math.exp(-2 * (math.exp(gap) - 1))) for gap in (0.2, -0.9)]
    assert soft.item() == pytest.approx(sum(expected) / 2)


def test_sequence_ratios_by_hand():
    case = terms([[[0.1, 0.3]], [[0.2, -0.1]]], [-2.0], weight=[[[0.5, 1.0]], [[1.5, 2.0]]])
    gap = 0.05 + 0.3 + 0.3 - 0.2
    assert SequenceRatio(clip_range=0.9, normalised=False).loss(case).item() == pytest.approx(2 * math.exp(gap))
    assert SequenceRatio(clip_range=0.9).loss(case).item() == pytest.approx(2 * math.exp(gap / 2))


def test_a_dual_clip_bounds_the_loss_of_bad_answers_and_an_advantage_of_0_stops_none():
    ratio, advantage = torch.tensor([5.0, 5.0, 2.0, 0.1, 5.0, 0.1]), torch.tensor([-1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    assert TokenRatio(dual=3.0).ratio_loss(ratio.log(), advantage).tolist() == pytest.approx(
        [3.0, -1.2, 2.0, 0.8, 0, 0]
    )
    assert TokenRatio(dual=3.0).ratio_stopped(ratio.log(), advantage).tolist() == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("surrogate", "good", "bad"), [("kept_gradient", 1.1, 0.9), ("frozen_ratio", 1.1, 0.9), ("tapered_ratio", 1, 0.5)]
)
def test_surrogates_of_tokens_and_answers_keep_gradients_beyond_the_clip(surrogate, good, bad):
    """An answer whose ratio is 1.5 and one whose ratio is 0.5, of one token each."""
    case = terms([[[math.log(1.5)], [math.log(0.5)]]], [2.0, -2.0])
    case = replace(case, new=case.new.requires_grad_())
    for objective in (TokenRatio, SequenceRatio):
        chosen = objective(clip_range=0.1, surrogate=surrogate)
        (slope,) = torch.autograd.grad(chosen.loss(case), case.new)
        assert slope.flatten().tolist() == pytest.approx([-2 * good / 2, 2 * bad / 2])
        assert not chosen.stopped(case).any()


def test_kl_forms_by_hand():
    by_hand = {"k1": [0.4, -0.2], "k2": [0.08, 0.02], "k3": [math.exp(-0.4) - 1 + 0.4, math.exp(0.2) - 1 - 0.2]}
    assert {form: kl(torch.tensor([0.4, -0.2])).tolist() for form, kl in KL.items()} == {
        form: pytest.approx(numbers, rel=1e-5) for form, numbers in by_hand.items()
    }
    assert torch.isfinite(KL["k3"](torch.tensor([-400.0, 400.0]))).all()


def test_k1_and_k3_are_the_kl_in_the_mean_and_k2_has_its_gradient():
    p, q = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for form in ("k1", "k3"):
        assert (p * KL[form]((p / q).log())).sum().item() == pytest.approx(exact.item())
    free = p.log().requires_grad_()
    (slope,) = torch.autograd.grad((free.softmax(0) * (free.log_softmax(0) - q.log())).sum(), free)
    (sampled,) = torch.autograd.grad((p * KL["k2"](free.log_softmax(0) - q.log())).sum(), free)
    torch.testing.assert_close(sampled, slope)


def test_divergences_by_hand():
    case = terms(
        [[[0.0, 0.0]], [[0.0, 0.0]]], [0.0], weight=[[[1.0, 0.0]], [[1.0, 2.0]]], reference=[[[0.1, 9]], [[0.3, 0.2]]]
    )
    tokens = Divergence(beta=0.5, form="k2").loss(case).item()
    assert tokens == pytest.approx(0.5 * (0.4**2 / 2 + 0.4**2 / 2) / 2)
    assert Divergence(beta=0.5, form="k2", level="sequence").loss(case).item() == pytest.approx(0.5 * 0.8**2 / 2 / 2)
    assert Divergence(beta=0.5, form="k2", target="old").loss(case).item() == 0
    both = TokenRatio(kl=Divergence(beta=0.5, form="k2"))
    assert both.loss(replace(case, advantage=torch.ones(1).double())).item() == pytest.approx(-1 + tokens)


def bound_and_objective(gap, advantage, share):
    gap = torch.tensor(gap, dtype=torch.float64)[:, None, None].requires_grad_()
    old = torch.full_like(gap, -3.0).detach()
    case = replace(terms(gap.detach(), [advantage], share), new=old + gap, old=old, token_weight=torch.ones(1, 1))
    found = []
    for objective in (LinearBound(), SequenceRatio(clip_range=1e9)):
        loss = -objective.loss(case)
        found.append((loss.item(), torch.autograd.grad(loss, gap)[0].flatten().tolist()))
    return found


SHARES = [0.2, 0.5, 0.3]


@pytest.mark.parametrize("advantage", [1.7, -0.6, 0.0])
def test_the_bound_is_the_objective_where_nothing_has_moved(advantage):
    (bound, slope), (exact, steepness) = bound_and_objective([0.0, 0.0, 0.0], advantage, SHARES)
    assert bound == pytest.approx(exact, abs=1e-12)
    assert exact == pytest.approx(advantage)
    assert slope == pytest.approx(steepness, abs=1e-12)
    assert slope == pytest.approx([advantage] * 3)


@given(st.lists(st.floats(-4, 2), min_size=3, max_size=3), st.floats(-3, 3))
@settings(max_examples=150, deadline=None)
def test_the_bound_lies_below_elsewhere(gap, advantage):
    """With d_j below -1 too: a gap of -4 at a share of 0.2 is d = -20."""
    (bound, slope), (exact, _) = bound_and_objective(gap, advantage, SHARES)
    assert bound <= exact + 1e-9
    assert all(map(math.isfinite, [bound, *slope]))


@pytest.mark.parametrize(
    ("advantage", "expected"), [(2.0, 2 * (1 + (0.5 - 3) / 2)), (-2.0, -2 * (math.exp(0.5) + math.exp(-3)) / 2)]
)
def test_the_bound_by_hand(advantage, expected):
    """d = (0.5, -3): A (1 + mean d) for A = 2, A mean e^d for A = -2; far from the objective it is strictly below."""
    (bound, _), (exact, _) = bound_and_objective([0.25, -1.5], advantage, [0.5, 0.5])
    assert bound == pytest.approx(expected)
    assert bound < exact - 0.1


def test_a_sandwich_by_hand():
    """One good answer and one bad one of two tokens; the second token of the bad one is in one view only."""
    new = [[[-1.0, -2.0], [-0.5, -1.5]], [[-3.0, 0.0], [-2.0, 0.0]]]
    weight = [[[1.0, 0.5], [0.5, 2.0]], [[1.0, 0.0], [0.5, 0.0]]]
    case = replace(terms(torch.zeros(2, 2, 2), [1.5, -0.5], weight=weight), new=torch.tensor(new, dtype=torch.float64))
    lower, upper = Sandwich(beta=2.0).bounds(case)
    assert lower.tolist() == pytest.approx([(-1 - 1 - 3) / 2, (-0.25 - 3 - 1) / 2])
    first = math.log(0.5 * math.exp(-1.0) + 0.5 * math.exp(-4.0)) / 2
    second = math.log(2 * math.exp(-3.0)) / 2
    assert upper[1].item() == pytest.approx((first + second) / 2)
    expected = -0.5 * (1.5 * lower[0] - 0.5 * (0.25 * upper[1] + 0.75 * lower[1]))
    assert Sandwich(beta=2.0, mix=0.25).loss(case).item() == pytest.approx(expected.item())


def test_a_sandwich_holds_the_likelihood():
    """The likelihood of decoding in a random order lies between the bounds, of all masks, with beta = L."""
    toy, one = Toy(), answers(scope="canvas", length=4, end=3)
    orders = torch.tensor(list(permutations(range(4))))
    chosen = [replace(one, steps=order[None]) for order in orders]
    each = torch.stack([estimate(toy, c, likelihood.trajectory(c), 8).seq[0] for c in chosen])
    exact = each.logsumexp(0) - math.log(24)
    # Every mask once: k of 4, weight (4 / k) / (4 C(4, k)).
    masks = torch.tensor([[bool(m >> i & 1) for i in range(4)] for m in range(1, 16)])
    weight = torch.tensor([1 / (m.sum() * math.comb(4, int(m.sum()))) for m in masks])[:, None, None] * masks[:, None]
    hidden = torch.zeros(15, *one.ids.shape, dtype=torch.bool)
    hidden[:, 0, one.prompt_length :] = masks
    every = masked_views.Views(hidden, weight, torch.full((15,), 1 / 15))
    each = estimate(toy, one, every, 16).each
    case = replace(terms(torch.zeros(15, 1, 4), [-1.0], weight=weight), new=each)
    lower, upper = Sandwich(beta=4.0).bounds(case)
    assert lower.item() * 4 < exact.item() < upper.item() * 4


PULL = Divergence(beta=0.1, form="k2", level="sequence")
OBJECTIVES = [
    TokenRatio(kl=Divergence(beta=0.1)),
    SequenceRatio(kl=PULL),
    SequenceRatio(gate=[1.0, 1.05], normalised=False),
    SequenceRatio(surrogate="tapered_ratio", normalised=False),
]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("objective", [*OBJECTIVES, LinearBound()])
def test_nothing_has_moved_before_the_first_update(name, objective):
    """Ratio 1 and KL 0, exactly, for every view in float32; and the loss is -A in the mean."""
    toy, given_answers = Toy(dtype=torch.float32), answers(rows=5)
    chosen = PLANS[name](given_answers)
    alike = {"micro_batch": 4, "separable": objective.separable(chosen)}  # what is cut otherwise is rounded otherwise
    old = estimate(toy, given_answers, chosen, **alike)
    reference = estimate(Toy(dtype=torch.float32), given_answers, chosen, **alike)
    weights = given_answers.scored / given_answers.scored.sum()
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0])
    inputs = {
        "advantage": advantage,
        "group": torch.zeros(5),
        "rank": torch.zeros(5),
        "token_weight": weights,
        "old": old.each,
        "reference": reference.each,
    }
    outcome = backward(toy, given_answers, chosen, objective=objective, micro_batch=4, **inputs)
    assert (objective.log_ratio(outcome.inputs) == 0).all()
    assert not objective.stopped(outcome.inputs).any()
    for form in KL:
        for level in ("token", "sequence"):
            assert Divergence(beta=1.0, form=form, level=level).mean(outcome.inputs).item() == 0
    if isinstance(objective, TokenRatio):
        weights = weights * chosen.scored.any(0)
    if not (isinstance(objective, SequenceRatio) and objective.gate):
        assert outcome.loss == pytest.approx(-(weights.sum(1) * advantage).sum().item(), abs=1e-6)


def test_the_upper_bound_is_a_mean_over_the_tokens_that_some_view_scores():
    """Of three scored tokens two are in a view: (1 / 1.5) log of the weighted sum of p^1.5 over views."""
    case = terms(torch.zeros(2, 1, 3), [-1.0], weight=[[[1.0, 0.5, 0.0]], [[0.0, 0.5, 0.0]]])
    new = torch.tensor([[[-1.0, -2.0, 0.0]], [[0.0, -0.5, 0.0]]], dtype=torch.float64)
    lower, upper = Sandwich(beta=1.5).bounds(replace(case, new=new, length=torch.tensor([3])))
    second = math.log(0.5 * math.exp(-3.0) + 0.5 * math.exp(-0.75)) / 1.5
    assert upper.item() == pytest.approx((-1.0 + second) / 2)
    assert lower.item() == pytest.approx((-1.0 - 1.0 - 0.25) / 3)
