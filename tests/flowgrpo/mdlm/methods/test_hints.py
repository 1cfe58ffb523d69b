"""What is given away of a solution, and which given tokens are trained on."""

import pytest
import torch
from toy_predictor import EOS, Toy, answers

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import GIVEN, Rollout
from flowgrpo.mdlm.methods.hints import Inpainting, highest_entropy, hints, replace_failed
from flowgrpo.mdlm.methods.likelihoods.answers import in_scope

MASK = 999
REASONING = torch.arange(40)


def test_hints_are_chunks_at_stretched_places_and_leave_room():
    seen = []
    for i in range(50):
        fixed = hints(REASONING, 80, MASK, ("hints", i), tail=20)
        assert torch.equal(fixed, hints(REASONING, 80, MASK, ("hints", i), tail=20))
        at = (fixed != MASK).nonzero()[:, 0]
        tokens = fixed[at]
        assert (at < 60).all()
        assert ((at >= tokens) & (at <= 1.5 * tokens)).all()  # (80 - 20) / 40 is 1.5
        assert len(tokens.unique()) == len(tokens)
        assert 39 not in tokens  # the last chunk is never told
        runs = torch.tensor_split(tokens, ((at.diff() > 1) | (tokens.diff() > 1)).nonzero()[:, 0] + 1)
        assert all(len(run) >= 5 and torch.equal(run, run[0] + torch.arange(len(run))) for run in runs if len(run))
        seen.append(len(tokens) / 40)
    assert 0.2 < sum(seen) / len(seen) < 0.45


def test_a_short_solution_gives_nothing_away_and_a_long_one_is_not_stretched():
    assert (hints(REASONING[:5], 40, MASK, 0) == MASK).all()
    assert (hints(REASONING[:0], 40, MASK, 0) == MASK).all()
    fixed = hints(torch.arange(200), 100, MASK, 1)
    told = fixed != MASK
    assert told.any()
    assert torch.equal(fixed[told], told.nonzero()[:, 0])
    assert not told[70:].any()


def test_a_tail_as_long_as_the_completion_is_refused():
    with pytest.raises(InputError, match="between 0 and the length 20"):
        hints(REASONING, 20, MASK, 0)


def rollout(given):
    """Two answers of 6 tokens that end at place 4 and 3, with some places given."""
    made = answers(rows=2)
    steps = torch.arange(6).repeat(2, 1)
    for row, places in enumerate(given):
        steps[row, places] = GIVEN
    six, chances = torch.full((2,), 6), torch.zeros(2, 6, dtype=torch.float64)
    return Rollout(
        ids=made.ids,
        attention_mask=made.attention_mask,
        step_map=steps,
        commit_logp=chances,
        nfe=six,
        steps=six,
        branched=six.new_zeros(2, 0),
        drafts=six.new_zeros(2, 0, 6),
    )


def least_certain(given, share):
    made = rollout(given)
    return highest_entropy(Toy(), made, in_scope(made.completion, EOS, "eos"), share=share, micro_batch=8)


def test_a_token_given_behind_the_end_is_not_trained_on():
    chosen = least_certain([[0, 5], [4, 5]], 1.0)
    assert chosen.nonzero().tolist() == [[0, 0]]


def test_of_the_given_tokens_the_least_certain_are_trained_on_and_one_at_least():
    given = [[0, 1, 2, 3], [0, 2]]
    made = rollout(given)
    ids = made.ids.clone()
    ids[:, made.prompt :] = Toy.mask_id
    predicted = Toy().logits(ids, made.attention_mask, made.prompt).detach().softmax(-1)
    entropy = torch.distributions.Categorical(predicted).entropy()
    for share, numbers in ((0.5, (2, 1)), (0.1, (1, 1)), (1.0, (4, 2))):
        for row, (places, number) in enumerate(zip(given, numbers, strict=True)):
            surest = sorted(places, key=lambda place, row=row: -float(entropy[row, place]))[:number]
            assert least_certain(given, share)[row].nonzero()[:, 0].tolist() == sorted(surest)


@pytest.mark.parametrize(("share", "told"), [(0.5, [(0, 1), (1, 2)]), (1.0, [(0, 1), (1, 2), (2, 4)]), (0.2, [])])
def test_the_first_that_succeed_replace_a_share_of_the_group(share, told):
    rewards = torch.tensor([0.5, 1.0, 3.0, 0.0])
    assert replace_failed(torch.cat([rewards, torch.ones(1)]), Inpainting(replace=share), 4) == told
