"""Which given tokens are trained on."""

import torch
from toy_predictor import EOS, Toy, answers

from flowgrpo.mdlm.decoding.decode import GIVEN, Rollout
from flowgrpo.mdlm.methods.answers import in_scope
from flowgrpo.mdlm.methods.hints import highest_entropy


def rollout(given):
    """Two answers of 6 tokens that end at place 4 and 3, with some places given."""
    made = answers(rows=2)
    steps = torch.arange(6).repeat(2, 1)
    for row, places in enumerate(given):
        steps[row, places] = GIVEN
    numbers = torch.zeros(2, 6, dtype=torch.float64)
    return Rollout(
        ids=made.ids,
        attention_mask=made.attention_mask,
        step_map=steps,
        commit_logp=numbers,
        nfe=torch.full((2,), 6),
        steps=torch.full((2,), 6),
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
