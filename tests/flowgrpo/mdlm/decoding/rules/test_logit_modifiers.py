"""What bends the scores of a step."""

import pytest
import torch
from predictors import MASK

from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.tokens.token_proposals import Proposed

EOS, LENGTH = 13, 8


def test_the_end_is_suppressed_less_and_less():
    (linear,) = build({"name": "eoser", "steps": 5}, 10, EOS).modifiers
    assert [linear.gamma(s, 5) for s in range(5)] == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0])
    (single,) = build({"name": "eoser", "steps": 1}, 10, EOS).modifiers
    assert single.gamma(0, 1) == 1
    (steep,) = build("eoser_ass", 256, EOS).modifiers
    known = [0.014, 0.022, 0.037, 0.068, 0.130, 0.254, 0.501, 0.996]
    assert [steep.gamma(s, 8) for s in range(8)] == pytest.approx(known, abs=5e-4)


EMPTY = torch.empty(0)


def test_noisy_scores_are_draws_without_replacement(first_step):
    rows, scores = 4000, torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    decoder = build({"name": "scheduled", "modifiers": [{"name": "gumbel", "temperature": 0.5}]}, 3)
    step = first_step(decoder, torch.full((rows, 3), MASK))
    drawn = decoder.modifiers[0](step, Proposed(*[EMPTY] * 4), scores.repeat(rows)).reshape(rows, 3)
    order = drawn.argsort(dim=1, descending=True)
    first = (scores / 0.5).softmax(0)
    found = order[:, 0].bincount(minlength=3) / rows
    torch.testing.assert_close(found.double(), first, rtol=0, atol=0.03)
    both = (order[:, :2] == torch.tensor([0, 1])).all(1).double().mean().item()
    assert both == pytest.approx((first[0] * first[1] / (1 - first[0])).item(), abs=0.03)


def changed(first_step, modifier, proposals, scores, completion=(), **options):
    """Scores of the open positions of one row after a modifier; the first positions have tokens already."""
    spec = {"name": "low_confidence", "modifiers": [{"name": modifier, **options}], "steps": 5}
    decoder, ids = build(spec, 5, EOS), torch.tensor([[*completion, *[MASK] * (5 - len(completion))]])
    step = first_step(decoder, ids, index=torch.tensor([1]), in_block=1)
    proposed = Proposed(torch.tensor(proposals), EMPTY, EMPTY, EMPTY)
    return decoder.modifiers[0](step, proposed, torch.tensor(scores, dtype=torch.float64)).tolist()


def test_the_end_s_scores_alone_are_lowered(first_step):
    """At the second of five steps by 0.4 + 0.6 / 4."""
    found = changed(first_step, "eoser", [3, EOS, 4, EOS, 5], [0.5, 0.8, 0.6, 0.4, 0.9], low=0.4, high=1.0)
    assert found == pytest.approx([0.5, 0.8 * 0.55, 0.6, 0.4 * 0.55, 0.9])


@pytest.mark.parametrize(("completion", "held"), [((3, 4), [0, 2]), ((3, EOS), []), ((3, 7), [])])
def test_ends_are_held_back_until_there_is_one(first_step, completion, held):
    """And 7, which is held back like the end."""
    scores = [0.5, 0.8, 0.6]
    found = changed(first_step, "held_back", [EOS, 4, 7], scores, completion, tokens=[7])
    assert found == [torch.finfo(torch.float64).min if i in held else score for i, score in enumerate(scores)]
