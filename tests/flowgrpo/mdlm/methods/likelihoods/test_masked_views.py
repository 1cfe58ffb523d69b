"""What the masked copies of an answer hide and score."""

from dataclasses import replace

import pytest
import torch
from toy_predictor import EOS, PLANS, Toy, answers, copies

from flowgrpo.mdlm.methods.likelihoods import likelihood
from flowgrpo.mdlm.methods.likelihoods.answers import Answers, in_scope
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate


def test_no_block_is_drawn_twice_before_all_are():
    many = copies(answers(scope="canvas"), 40)
    first = likelihood.blocks(many, size=2, draws=5, prompt_rate=0.0).scored.int().argmax(2)  # (5, 40)
    chosen = first // 2
    assert (chosen[:3].sort(0).values == torch.arange(3)[:, None]).all()
    assert (chosen[3] != chosen[4]).all()
    assert len(chosen.T.unique(dim=0)) > 20


def test_strata_cover_all_counts():
    many = copies(answers(scope="canvas"), 50)
    counts = likelihood.exact_k(many, draws=6, stratified=True).scored.sum(2)  # (6, 50)
    assert (counts.sort(0).values == torch.arange(1, 7)[:, None]).all()
    assert len(counts[0].unique()) == 6
    first, *others = likelihood.exact_k(many, draws=3, stratified=True).scored.sum(2)
    assert all(torch.equal((first + shift - 1) % 6 + 1, found) for shift, found in zip((2, 4), others, strict=True))


def test_strata_of_rates_are_a_quarter_apart():
    many = copies(answers(scope="canvas"), 50)
    weight = likelihood.bernoulli(many, draws=4, stratified=True).weight.amax(2).double()
    rates = 1 / (4 * weight)  # infinite where none
    for row in rates.T:
        known = row.isfinite()
        quarters = (row[known] * 4).floor()
        assert (quarters == (3 - torch.arange(4))[known]).all()
        torch.testing.assert_close(row[known] * 4 % 1, (row[known][:1] * 4 % 1).expand(known.sum()), rtol=0, atol=1e-5)
    assert rates[rates.isfinite()].max() > 0.95


@pytest.mark.parametrize("name", ["autoregressive", "trajectory", "shrunk"])
def test_orders_partition_the_scored_tokens(name):
    given = answers(rows=5)
    chosen = PLANS[name](given)
    assert torch.equal(chosen.scored.sum(0), given.scored.long())
    assert torch.equal(chosen.weight.sum(0), given.scored.float())
    assert chosen.disjoint
    hidden = chosen.hidden[:, :, given.prompt_length :]
    assert (hidden >= chosen.scored).all()
    assert (hidden[:-1] >= hidden[1:]).all()  # what is seen stays seen
    for v in range(len(hidden)):  # hidden is what this view or a later one commits, and what is not scored but as late
        later = chosen.scored[v:].any(0)
        assert (hidden[v] >= later).all()
        assert not (hidden[v] & chosen.scored[:v].any(0)).any()


def test_the_halves_of_coupled_views_are_disjoint_and_cover():
    given = answers(rows=5)
    for plan in (likelihood.coupled, likelihood.coupled_as_released):
        whole, half, rest = plan(given).scored
        assert torch.equal(half ^ rest, given.scored)
        assert torch.equal(whole, given.scored)
        assert not plan(given).disjoint


def test_a_trajectory_sees_what_the_decoder_saw():
    ids = torch.tensor([[9, 9, 1, 2, 3, 4, 0, 0]])
    scored = torch.tensor([[True, True, True, True, False, False]])
    steps = torch.tensor([[4, 0, -1, 4, 2, 7]])
    seen = torch.ones_like(ids, dtype=torch.bool)
    given = Answers(ids=ids, attention_mask=seen, scored=scored, addresses=[("x",)], steps=steps)
    chosen = likelihood.trajectory(given)
    hidden = chosen.hidden[:, 0, 2:].int().tolist()
    assert hidden == [[1, 1, 0, 1, 1, 1], [1, 0, 0, 1, 1, 1], [1, 0, 0, 1, 0, 1]]  # of the steps 0, 2 and 4
    assert chosen.weight[:, 0].tolist() == [[0, 1, 0, 0, 0, 0], [0] * 6, [1, 0, 0, 1, 0, 0]]
    pairs = likelihood.trajectory(given, shrink=2)  # steps (0, 2), then (4, 7)
    assert pairs.hidden[:, 0, 2:].int().tolist() == [[1, 1, 0, 1, 1, 1], [1, 0, 0, 1, 0, 1]]
    assert pairs.weight[:, 0].tolist() == [[0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0]]
    with pytest.raises(ValueError, match="steps"):
        likelihood.trajectory(replace(given, steps=None))


def test_blocks_score_all_that_they_hide():
    given = answers(rows=60, scope="canvas", length=8, end=7)
    chosen = likelihood.blocks(given, size=3, draws=1, prompt_rate=0.0)
    seen = set()
    for row in range(60):
        hidden, scored = chosen.hidden[0, row, given.prompt_length :], chosen.scored[0, row]
        assert torch.equal(hidden, scored)
        block = int(hidden.int().argmax()) // 3
        seen.add(block)
        assert hidden[3 * block + 3 :].all()
        torch.testing.assert_close(chosen.weight[0, row], hidden * 8 / hidden.sum())
    assert seen == {0, 1, 2}
    perturbed = likelihood.blocks(given, size=3, draws=1, prompt_rate=0.5)
    first = perturbed.hidden[0, :, given.prompt_length :]
    assert not torch.equal(first, chosen.hidden[0, :, given.prompt_length :])
    assert torch.equal(first, perturbed.scored[0])


ORDERS = ("autoregressive", "trajectory", "shrunk")


@pytest.mark.parametrize("name", PLANS)
def test_scored_tokens_are_hidden_and_the_unscored_too(name):
    given = answers(rows=6)
    chosen = PLANS[name](given)
    hidden = chosen.hidden[:, :, given.prompt_length :]
    assert (hidden | ~chosen.scored).all()
    assert not (chosen.scored & ~given.scored).any()
    assert (chosen.weight >= 0).all()
    assert chosen.view_weight.sum().item() == pytest.approx(1)
    if name not in ORDERS:
        assert (hidden | given.scored).all()


@pytest.mark.parametrize("name", PLANS)
def test_given_tokens_are_seen_like_the_prompt(name):
    """Two tokens of the canvas that the decoder found there: neither scored nor hidden; all else is as without them."""
    plain = answers(rows=6, scope="canvas")
    hint = torch.tensor([False, True, False, False, True, False])
    hinted = replace(plain, scored=plain.scored & ~hint, steps=plain.steps.where(~hint, -1))
    chosen = PLANS[name](hinted)
    hidden = chosen.hidden[:, :, hinted.prompt_length :]
    assert not hidden[:, :, hint].any()
    assert not chosen.scored[:, :, hint].any()
    assert hidden.any(0)[:, ~hint].any(0).all()


@pytest.mark.parametrize("name", PLANS)
def test_estimates_know_nothing_of_batch_and_padding(name):
    toy, given = Toy(), answers(rows=6)
    plan = PLANS[name]
    whole = estimate(toy, given, plan(given), 64)
    assert torch.isfinite(whole.seq).all()
    turned = torch.tensor([4, 1, 0, 5, 3, 2])
    other = given.of(turned)
    torch.testing.assert_close(estimate(toy, other, plan(other), 5).token, whole.token[turned])
    padding = torch.full((6, 4), EOS)
    seen = torch.cat([torch.zeros_like(padding, dtype=torch.bool), given.attention_mask], 1)
    padded = replace(given, ids=torch.cat([padding, given.ids], 1), attention_mask=seen)
    torch.testing.assert_close(estimate(toy, padded, plan(padded), 3).seq, whole.seq)
    alone = given.of(torch.tensor([2]))
    torch.testing.assert_close(estimate(toy, alone, plan(alone), 1).seq, whole.seq[2:3])


@pytest.mark.parametrize("name", [name for name in PLANS if name not in ORDERS])
def test_masks_belong_to_an_address(name):
    given = answers(rows=6)
    again, other = PLANS[name](given), PLANS[name](replace(given, addresses=[("other", i) for i in range(6)]))
    assert torch.equal(again.hidden, PLANS[name](given).hidden)
    assert not torch.equal(again.hidden, other.hidden)


def test_scope_ends_with_the_first_eos():
    completion = torch.tensor([[1, EOS, 2, EOS], [EOS, 1, 1, 1], [1, 2, 3, 4]])
    assert in_scope(completion, EOS, "eos").int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert in_scope(completion, EOS, "canvas").all()


def test_tokens_of_a_branch_are_scored_once_with_the_weight_of_all_its_answers():
    """Three answers of three tokens: the first two share the branch of token 0, and all that of token 2."""
    given = replace(answers(rows=3, length=3, end=3), steps=torch.arange(3).repeat(3, 1))
    given.scored[0, 2] = False  # the first answer ended before
    branch, weight = torch.tensor([[0, 1, 4], [0, 2, 4], [3, 5, 4]]), torch.arange(1.0, 10).reshape(3, 3)
    once = likelihood.trajectory(given).once(branch)
    assert once.scored.any(0).tolist() == [[True, True, False], [False, True, True], [True, True, False]]
    weight[0, 2] = 0.0
    assert once.carried(weight, branch).tolist() == [[5.0, 2.0, 0.0], [0.0, 5.0, 15.0], [7.0, 8.0, 0.0]]
