import math
from contextlib import contextmanager

import pytest
import torch
from toy_predictor import MASK, PLANS, VOCABULARY, Toy, answers

from flowgrpo.mdlm.methods.likelihoods.distributions import entropies, gated_distances, group_spread
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate

GROUP = torch.tensor([4, 2, 4])


def predicted(toy, given, hidden):
    """Probabilities (B, L, V) of one view."""
    ids = given.ids.masked_fill(hidden, toy.mask_id)
    return toy.logits(ids, given.attention_mask)[:, given.prompt_length :].softmax(-1)


@pytest.mark.parametrize("plan", ["one_step", "coupled", "exact_k", "trajectory"])
@pytest.mark.parametrize("micro_batch", [2, 100])
def test_the_entropy_of_a_token_is_that_of_what_the_views_predict(plan, micro_batch):
    toy, given = Toy(1, gain=2.0), answers(rows=3)
    views = PLANS[plan](given)
    found = estimate(toy, given, views, micro_batch, measure=entropies)
    plain = estimate(toy, given, views, micro_batch)
    assert torch.equal(found.each, plain.each)
    assert plain.measured is None
    sums, weights = torch.zeros(given.scored.shape, dtype=torch.float64), torch.zeros(given.scored.shape)
    for view, (hidden, weight) in enumerate(zip(views.hidden, views.weight, strict=True)):
        p = predicted(toy, given, hidden)
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
        sums, weights = sums + weight * entropy, weights + weight
        torch.testing.assert_close(found.measured[view], torch.where(views.scored[view], entropy, 0.0))
    known = weights > 0
    torch.testing.assert_close(found.token_measure[known], (sums / weights)[known])
    assert not found.token_measure[~known].any()


@pytest.mark.parametrize("plan", ["one_step", "trajectory"])
def test_a_prediction_that_left_the_reference_counts_by_its_entropy(plan):
    toy, start, given = Toy(1, gain=2.0), Toy(2, gain=2.0), answers(rows=3)
    views = PLANS[plan](given)

    @contextmanager
    def reference():
        own, toy.out.data = toy.out.data, start.out.data
        yield
        toy.out.data = own

    found = estimate(toy, given, views, 2, measure=gated_distances(toy, given, views, reference))
    assert torch.equal(found.each, estimate(toy, given, views, 2).each)
    for view, hidden in enumerate(views.hidden):
        with reference():
            others = predicted(toy, given, hidden)
        for row, place in views.scored[view].nonzero().tolist():
            p, q = (each[row, place].tolist() for each in (predicted(toy, given, hidden), others))
            distance = math.sqrt(sum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(p, q, strict=True)) / 2)
            entropy = -sum(a * math.log(a) for a in p if a > 0)
            assert found.measured[view, row, place].item() == pytest.approx(distance * entropy / math.log(VOCABULARY))
    same = estimate(toy, given, views, 2, measure=gated_distances(toy, given, views, torch.no_grad))
    assert not same.measured.any()


@pytest.mark.parametrize("plan", ["one_step", "coupled", "exact_k", "bernoulli", "trajectory"])
@pytest.mark.parametrize(("micro_batch", "gain"), [(2, 2.0), (100, 2.0), (100, 9.0)])
def test_the_spread_over_a_group_is_that_of_its_mean_log_probabilities(plan, micro_batch, gain):
    """Answers 0, 2 and 3 are of one group. A gain of 9 meets the clamp.

    The last place of answer 2 is behind its end; other places without a score are left out.
    """
    toy, given = Toy(1, gain=gain), answers(rows=4)
    given.scored[2, -1] = False
    views = PLANS[plan](given)
    ended = torch.zeros_like(given.scored)
    ended[2, -1] = True
    found = group_spread(toy, given, views, group=torch.tensor([4, 2, 4, 4]), ended=ended, micro_batch=micro_batch)
    assert not found[1].any()  # an answer alone does not differ from itself
    weights = views.weight.sum(0)
    tables = sum(weight[..., None] * predicted(toy, given, hidden).clamp(min=1e-300).log()
                 for hidden, weight in zip(views.hidden, views.weight, strict=True))  # fmt: skip
    left_out = 0
    for place in range(given.scored.shape[1]):
        scored = [row for row in (0, 2, 3) if weights[row, place] > 0]
        left_out += 3 - len(scored)
        logs = [(tables[row, place] / weights[row, place]).tolist() for row in scored]
        if place == given.scored.shape[1] - 1:
            logs.append([-math.log(VOCABULARY)] * VOCABULARY)
        expected = 0.0
        for token in range(VOCABULARY):
            mean = sum(row[token] for row in logs) / max(1, len(logs))
            for row in logs:
                gap = max(-11.0, min(11.0, mean - row[token]))
                expected += 0.0 if token == MASK else (math.exp(gap) - gap - 1) / len(logs)
        for row in (0, 2, 3):
            there = pytest.approx(expected, rel=1e-4, abs=1e-6) if row in scored else 0
            assert found[row, place].item() == there
    assert found[0].max() > 0.1
    assert left_out > 1 or plan not in ("exact_k", "bernoulli")


def test_a_broken_prediction_spoils_its_own_answer_alone():
    toy, given, others = Toy(1, gain=2.0), answers(rows=3), torch.tensor([0, 2])
    views, real, none = PLANS["one_step"](given), toy.logits_at, torch.zeros_like(given.scored)
    one = {"group": torch.full((3,), 4), "ended": none, "micro_batch": 1}
    two = {**one, "group": one["group"][others], "ended": none[others]}
    whole = group_spread(toy, given.of(others), views.of(others), **two)
    calls = []

    def broken(*arguments):
        calls.append(arguments)
        return real(*arguments) * (torch.nan if len(calls) == 2 else 1.0)

    toy.logits_at = broken
    found = group_spread(toy, given, views, **one)
    assert found[1][views.scored[0, 1]].isnan().all()
    torch.testing.assert_close(found[others], whole)


def test_a_group_without_scored_tokens_has_no_spread():
    toy, given = Toy(1), answers(rows=3)
    given.scored[:] = False
    views = PLANS["one_step"](given)
    assert not group_spread(toy, given, views, group=GROUP, ended=~given.scored, micro_batch=2).any()
