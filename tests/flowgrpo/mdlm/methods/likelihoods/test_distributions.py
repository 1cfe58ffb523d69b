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


@pytest.mark.parametrize("plan", ["one_step", "coupled", "exact_k", "trajectory"])
@pytest.mark.parametrize(("micro_batch", "gain"), [(2, 2.0), (100, 2.0), (100, 9.0)])
def test_the_spread_over_a_group_is_that_of_its_mean_log_probabilities(plan, micro_batch, gain):
    """Answers 0 and 2 are of one group. Unscored tokens have a uniform prediction. A gain of 9 meets the clamp."""
    toy, given = Toy(1, gain=gain), answers(rows=3)
    given.scored[2, -1] = False
    views = PLANS[plan](given)
    found = group_spread(toy, given, views, group=GROUP, micro_batch=micro_batch)
    assert not found[1].any()  # an answer alone does not differ from itself
    assert torch.equal(found[0], found[2])
    weights = views.weight.sum(0)
    tables = sum(weight[..., None] * predicted(toy, given, hidden).clamp(min=1e-300).log()
                 for hidden, weight in zip(views.hidden, views.weight, strict=True))  # fmt: skip
    for place in range(given.scored.shape[1]):
        logs = [(tables[row, place] / weights[row, place]).tolist() if weights[row, place] > 0
                else [-math.log(VOCABULARY)] * VOCABULARY for row in (0, 2)]  # fmt: skip
        expected = 0.0
        for token in range(VOCABULARY):
            mean = (logs[0][token] + logs[1][token]) / 2
            for row in logs:
                gap = max(-11.0, min(11.0, mean - row[token]))
                expected += 0.0 if token == MASK else (math.exp(gap) - gap - 1) / 2
        assert found[0, place].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found[0].max() > 0.1


def test_a_group_without_scored_tokens_has_no_spread():
    toy, given = Toy(1), answers(rows=3)
    given.scored[:] = False
    assert not group_spread(toy, given, PLANS["one_step"](given), group=GROUP, micro_batch=2).any()
