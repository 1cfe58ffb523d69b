import math
from dataclasses import fields

import pytest
import torch
from toy_predictor import answers

from flowgrpo.mdlm.methods.likelihoods.masked_views import token_draws
from flowgrpo.mdlm.methods.objectives.covariance import Covariance, ScoredTokens, choose_tokens
from flowgrpo.mdlm.methods.objectives.objective import LossInputs, TokenRatio

# Two answers of three tokens, the last one not scored: mean A = 0.2, mean log p = -2, and c = (A - 0.2) (log p + 2) is 0.8,
# -0.8 and 0 in the first, 2.4 and -2.4 in the second.
TOKENS = ScoredTokens(
    advantage=torch.tensor([1.0, -1.0]),
    scored=torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
    log_prob=torch.tensor([[-1.0, -3.0, -2.0], [-4.0, 0.0, -9.0]]),
    draw=torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.3, 0.0]], dtype=torch.float64),
)


def many(rows=40, length=50, seed=0):
    random = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(rows, length, generator=random) for _ in range(2)]
    return ScoredTokens(
        advantage=torch.randn(rows, generator=random),
        scored=numbers[0] > -1,
        log_prob=numbers[1],
        draw=torch.rand(rows, length, generator=random, dtype=torch.float64),
    )


def rows(tokens, some):
    return ScoredTokens(**{field.name: getattr(tokens, field.name)[some] for field in fields(tokens)})


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"rule": "kl"}, [3]),  # the largest c
        ({"rule": "kl", "share": 0.4}, [0, 3]),
        ({"rule": "clip"}, [3]),  # the only c in 1..5
        ({"rule": "clip", "bounds": [0.5, 5.0]}, [3]),  # 0.2 is drawn before 0.9
        ({"rule": "clip", "bounds": [0.5, 2.0]}, [0]),
        ({"rule": "clip", "bounds": [3.0, 5.0]}, []),
        ({"rule": "clip", "bounds": [0.5, 5.0], "share": 1.0}, [0, 3]),
    ],
)
def test_the_chosen_tokens_by_hand(options, chosen):
    found = Covariance(**options).choose(TOKENS)
    assert found[TOKENS.scored].nonzero()[:, 0].tolist() == chosen
    assert not found[~TOKENS.scored].any()


@pytest.mark.parametrize("rule", ["clip", "kl"])
@pytest.mark.parametrize("share", [0.002, 0.02, 0.1])
def test_the_share_of_chosen_tokens(rule, share):
    tokens = many()
    bounds = {"bounds": [0.0, 9.0]} if rule == "clip" else {}
    found = Covariance(rule=rule, share=share, **bounds).choose(tokens)
    assert found.sum().item() == int(share * int(tokens.scored.sum()))


@pytest.mark.parametrize("rule", ["clip", "kl"])
def test_neither_the_order_of_answers_nor_processes_change_the_choice(rule):
    tokens, order = many(), torch.randperm(40, generator=torch.Generator().manual_seed(1))
    covariance = Covariance(rule=rule, share=0.05)
    whole = covariance.choose(tokens)
    assert whole.any()
    assert torch.equal(covariance.choose(rows(tokens, order)), whole[order])
    parts = [rows(tokens, slice(0, 13)), rows(tokens, slice(13, 40))]
    apart = [choose_tokens(covariance, parts[rank], lambda own: [(i, vars(p)) for i, p in enumerate(parts)], rank)
             for rank in (0, 1)]  # fmt: skip
    assert torch.equal(torch.cat(apart), whole)


def test_clip_cov_draws_uniformly_among_the_tokens_within_bounds():
    counts, tokens = torch.zeros(40, 50), many()
    for seed in range(200):
        draw = torch.rand(40, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        counts += Covariance(share=0.02).choose(ScoredTokens(**{**vars(tokens), "draw": draw}))
    c = (tokens.advantage[:, None].expand(40, 50), tokens.log_prob)
    c = math.prod(x - x[tokens.scored].mean() for x in c)
    within = tokens.scored & (c > 1) & (c < 5)
    share = int(0.02 * int(tokens.scored.sum())) / int(within.sum())
    assert not counts[~within].any()
    assert ((counts[within] / 200 - share).abs() < 6 * (share / 200) ** 0.5).all()


def test_random_numbers_of_tokens_belong_to_their_rows():
    given = answers(rows=3)
    draws = token_draws(given, "covariance")
    assert torch.equal(token_draws(given.of(torch.tensor([2, 0])), "covariance"), draws[[2, 0]])
    assert len(draws.unique()) == draws.numel()


def inputs(new):
    return LossInputs(
        new=new,
        old=torch.tensor([[[-1.0, -2.0, -0.5, -1.5]]]),
        reference=None,
        weight=torch.ones(1, 1, 4),
        view_weight=torch.ones(1),
        length=torch.tensor([4]),
        advantage=torch.tensor([2.0]),
        group=torch.tensor([0]),
        rank=torch.zeros(1),
        token_weight=torch.full((1, 4), 0.25),
        active_views=torch.ones(1, 1, dtype=torch.bool),
        order=torch.zeros(1, 4, dtype=torch.long),
        chosen=torch.tensor([[True, False, False, True]]),
    )


@pytest.mark.parametrize(
    ("covariance", "slopes", "stopped"),
    [
        (Covariance(), [0, -2 * math.exp(0.1) / 4, 0, 0], [True, False, True, True]),
        (
            Covariance(rule="kl", coefficient=3.0),
            [
                (-2 * math.exp(-0.3) - 3) / 4,
                -2 * math.exp(0.1) / 4,
                -2 * math.exp(0.6) / 4,
                (-2 * math.exp(0.6) + 3) / 4,
            ],
            [False] * 4,
        ),
    ],
)
def test_gradients_of_chosen_tokens_by_hand(covariance, slopes, stopped):
    """Log ratios -0.3, 0.1, 0.6 and 0.6; the clip range of 0.2 stops the last two."""
    new = (torch.tensor([[[-1.0, -2.0, -0.5, -1.5]]]) + torch.tensor([-0.3, 0.1, 0.6, 0.6])).requires_grad_()
    objective = TokenRatio(covariance=covariance)
    (slope,) = torch.autograd.grad(objective.loss(inputs(new)), new)
    assert slope[0, 0].tolist() == pytest.approx(slopes)
    assert objective.stopped(inputs(new.detach())).tolist() == [stopped]


def test_where_nothing_has_moved_the_penalty_of_kl_cov_has_no_gradient():
    new = torch.tensor([[[-1.0, -2.0, -0.5, -1.5]]], requires_grad=True)
    (slope,) = torch.autograd.grad(TokenRatio(covariance=Covariance(rule="kl")).loss(inputs(new)), new)
    assert slope[0, 0].tolist() == [-0.5] * 4
