import math
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch

from flowgrpo.mdlm.methods.objectives.objective import LossInputs, TokenRatio
from flowgrpo.mdlm.methods.objectives.token_shapes import Shape, Tokens, shape_tokens

RULES = get_args(Shape.model_fields["rule"].annotation)
TOKENS = Tokens(  # three answers of one group, four tokens each; the last of the second is not scored
    advantage=torch.tensor([1.0, -0.5, -0.5]),
    group=torch.tensor([3, 3, 3]),
    ids=torch.tensor([[7, 8, 9, 1], [7, 5, 9, 2], [1, 8, 6, 0]]),
    scored=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool(),
    step=torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2], [0, 0, 0, 0]]),
    measure=torch.tensor([[0.2, 0.4, 2.0, 1.0], [0.1, 0.5, 0.9, 0.0], [1.5, 0.5, 0.2, 0.6]]),
)


def repeated(tokens, count):
    """Every answer so many times, the copies of a group in one group."""
    return Tokens(**{field.name: torch.cat([getattr(tokens, field.name)] * count) for field in fields(tokens)})


def rows(tokens, some):
    return Tokens(**{field.name: getattr(tokens, field.name)[some] for field in fields(tokens)})


@pytest.mark.parametrize("rule", RULES)
def test_weights_have_a_mean_of_1_and_never_turn_an_advantage_around(rule):
    weights = Shape(rule=rule).weights(TOKENS)
    assert weights[TOKENS.scored].mean().item() == pytest.approx(1)
    assert weights.min() >= 0
    assert weights[~TOKENS.scored].tolist() == [1.0]
    assert (weights[TOKENS.scored] - 1).abs().max() > 0.1


@pytest.mark.parametrize("rule", ["confident", "uncertain", "pivotal", "divergent", "departed"])
def test_a_constant_measure_changes_nothing(rule):
    same = replace(TOKENS, measure=torch.full_like(TOKENS.measure, 0.7))
    assert Shape(rule=rule).weights(same).tolist() == [[1.0] * 4] * 3


def test_equal_products_of_advantage_and_entropy_change_nothing():
    same = replace(TOKENS, measure=torch.full_like(TOKENS.measure, 0.7), advantage=torch.tensor([0.5, -0.5, -0.5]))
    assert Shape(rule="largest").weights(same).tolist() == [[1.0] * 4] * 3


def test_answers_without_a_shared_token_are_in_no_conflict():
    apart = replace(TOKENS, ids=torch.arange(12).view(3, 4))
    groups = replace(TOKENS, group=torch.tensor([0, 1, 2]))
    for case in (apart, groups, replace(TOKENS, advantage=torch.ones(3))):
        assert Shape(rule="conflict").weights(case).tolist() == [[1.0] * 4] * 3


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_twice_as_large_has_the_same_weights(rule):
    once, twice = (Shape(rule=rule, quantile=0.5 if rule == "uncertain" else 0.8).weights(each)
                   for each in (TOKENS, repeated(TOKENS, 2)))  # fmt: skip
    if rule == "uncertain":  # a quantile between two tokens moves with their number
        assert (twice[:3] - once).abs().max() < 0.15
    else:
        torch.testing.assert_close(twice, once.repeat(2, 1))


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_answers_does_not_matter(rule):
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(Shape(rule=rule).weights(rows(TOKENS, order)), Shape(rule=rule).weights(TOKENS)[order])


def test_confident_steps_by_hand():
    """The mean entropies of the steps are 0.3 and 1.5; 0.1, 0.5 and 0.9; 0.7: the last token of answer 1 is not scored."""
    raw = [[0.3, 0.3, 1.5, 1.5], [0.1, 0.5, 0.9, None], [0.7] * 4]
    raw = [[None if h is None else math.exp(-2 * (h - 0.1) / 1.4) for h in row] for row in raw]
    known = [w for row in raw for w in row if w is not None]
    expected = [[1.0 if w is None else w * 11 / sum(known) for w in row] for row in raw]
    torch.testing.assert_close(Shape(rule="confident", sharpness=2.0).weights(TOKENS), torch.tensor(expected))


def test_uncertain_tokens_by_hand():
    """Of eleven entropies the sixth is the median, 0.5; the least, 0.1, weighs nothing, those above the median 1."""
    raw = [[math.log(min(h, 0.5) / 0.1) / math.log(5) for h in row] for row in TOKENS.measure.clamp(min=0.1).tolist()]
    known = sum(map(sum, raw)) - raw[1][3]
    expected = [[w * 11 / known for w in row] for row in raw]
    expected[1][3] = 1.0
    torch.testing.assert_close(Shape(rule="uncertain", quantile=0.5).weights(TOKENS), torch.tensor(expected))


def test_conflicts_by_hand():
    """Answer 0 is good; at places 0, 1 and 2 it shares tokens with bad ones."""
    raw = torch.tensor([[2.0, 2, 2, 1], [0, 1, 0, 11 / 11], [1, 0, 1, 1]])
    expected = raw * 11 / 11
    expected[1, 3] = 1.0
    torch.testing.assert_close(Shape(rule="conflict").weights(TOKENS), expected)


def test_the_largest_products_by_hand():
    """|A| H of answer 0 is 0.2, 0.4, 2, 1; of the others half of H, at most 0.75: three of eleven are 2, 1 and 0.75."""
    weights = Shape(rule="largest", share=0.25).weights(TOKENS)
    expected = torch.zeros(3, 4)
    expected[0, 2:], expected[2, 0], expected[1, 3] = 11 / 3, 11 / 3, 1.0
    torch.testing.assert_close(weights, expected)


def test_the_share_of_the_largest_moves_over_training():
    shape = Shape(rule="largest", share=0.1, end=0.5)
    assert [shape.at(done).share for done in (0, 0.25, 1)] == pytest.approx([0.1, 0.2, 0.5])
    assert Shape(rule="largest", share=0.1).at(0.5).share == 0.1
    assert [int((shape.at(done).weights(TOKENS) > 0)[TOKENS.scored].sum()) for done in (0, 1)] == [1, 6]


def test_advantages_of_single_tokens_decide_what_conflicts():
    each = TOKENS.advantage[:, None].repeat(1, 4)
    each[1, 0] = 0.5  # then no bad answer begins with token 7
    weights = Shape(rule="conflict").weights(replace(TOKENS, advantage=each))
    assert weights[0, 0] == weights[1, 0] == weights[0, 3]


@pytest.mark.parametrize("rule", RULES)
def test_two_processes_weigh_as_one(rule):
    shape, parts = Shape(rule=rule), [rows(TOKENS, torch.tensor([0])), rows(TOKENS, torch.tensor([1, 2]))]
    found = []
    for rank in (0, 1):
        found.append(
            shape_tokens(shape, parts[rank], lambda own: [(i, vars(part)) for i, part in enumerate(parts)], rank)
        )
    torch.testing.assert_close(torch.cat(found), shape.weights(TOKENS))


def test_a_process_without_answers_takes_part():
    nothing = rows(TOKENS, torch.tensor([], dtype=torch.long))
    found = shape_tokens(Shape(rule="uncertain"), nothing, lambda own: [(0, vars(TOKENS)), (1, vars(nothing))], 1)
    assert found.shape == (0, 4)
    assert Shape(rule="confident").weights(nothing).shape == (0, 4)


def test_the_gradient_of_a_token_is_its_weight_times_the_plain_one():
    """Two tokens of one answer, A = 2: the gradients are -A w / 2 each where nothing has moved."""
    tokens = Tokens(
        advantage=torch.tensor([2.0]),
        group=torch.tensor([0]),
        ids=torch.tensor([[1, 2]]),
        scored=torch.ones(1, 2, dtype=torch.bool),
        step=torch.tensor([[0, 1]]),
        measure=torch.tensor([[0.3, 1.1]]),
    )
    weights = Shape(rule="confident").weights(tokens)
    share = math.exp(-1)
    assert weights.tolist() == [pytest.approx([2 / (1 + share), 2 * share / (1 + share)])]
    new = torch.full((1, 1, 2), -1.5, requires_grad=True)
    given = LossInputs(
        new=new,
        old=new.detach(),
        reference=None,
        weight=torch.ones(1, 1, 2),
        view_weight=torch.ones(1),
        length=torch.tensor([2]),
        advantage=tokens.advantage,
        group=tokens.group,
        rank=torch.zeros(1),
        token_weight=weights / 2,
        active_views=torch.ones(1, 1, dtype=torch.bool),
        order=tokens.step,
    )
    (slope,) = torch.autograd.grad(TokenRatio().loss(given), new)
    assert slope[0, 0].tolist() == pytest.approx([-2 * w / 2 for w in weights[0].tolist()])


def test_pivotal_tokens_by_hand():
    """Two groups: the entropies of each are compared among themselves."""
    tokens = replace(TOKENS, group=torch.tensor([3, 3, 1]))
    raw = []
    for rows in (TOKENS.measure[:2].flatten()[:7].tolist(), TOKENS.measure[2].tolist()):
        mean = sum(rows) / len(rows)
        std = (sum((h - mean) ** 2 for h in rows) / len(rows)) ** 0.5
        raw += [1 / (1 + math.exp(-2 * (h - mean) / std)) for h in rows]
    weights = Shape(rule="pivotal", slope=2.0).weights(tokens)
    assert weights[TOKENS.scored].tolist() == pytest.approx([w * 11 / sum(raw) for w in raw])


def test_divergent_places_by_hand():
    """A spread is mapped to 0..1 over its group: 0.1 to 2.0 in one, 0.2 to 1.5 in the other."""
    tokens = replace(TOKENS, group=torch.tensor([3, 3, 1]))
    raw = [1 + 0.5 * (d - 0.1) / 1.9 for d in TOKENS.measure[:2].flatten()[:7].tolist()]
    raw += [1 + 0.5 * (d - 0.2) / 1.3 for d in TOKENS.measure[2].tolist()]
    weights = Shape(rule="divergent", alpha=1.5).weights(tokens)
    assert weights[TOKENS.scored].tolist() == pytest.approx([w * 11 / sum(raw) for w in raw])


def test_departed_tokens_by_hand():
    """The weights of an answer have a mean of 1: its advantage is dealt out anew."""
    weights = Shape(rule="departed", temperature=0.25).weights(TOKENS)
    for found, scores, scored in zip(weights, TOKENS.measure, TOKENS.scored, strict=True):
        raw = [math.exp(s / 0.25) for s in scores[scored].tolist()]
        assert found[scored].tolist() == pytest.approx([len(raw) * w / sum(raw) for w in raw])
