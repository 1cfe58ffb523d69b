import math

import pytest
import torch
from predictors import random_table

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy, actions_taken, apply_actions

PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])
SEEDS = [(0, "decode", group) for group in range(3)]
START = {"ratio": 0.5, "temperature": 1.0, "selection_temperature": 0.5, "cfg_scale": 1.0}


def test_actions_belong_to_their_seed_and_lie_between_their_bounds():
    policy = SchedulePolicy(START, steps=6, std=2.0)
    actions = policy.draw(SEEDS)
    one = policy.draw(SEEDS[1:2])
    assert torch.equal(actions.raw[1], one.raw[0])
    assert torch.equal(actions.log_prob[1], one.log_prob[0])
    assert (actions.values.amin((0, 1)) > 0).all()
    assert (actions.values.amax((0, 1)) < torch.tensor([1.0, 2.0, 2.0, 4.0])).all()
    assert len(actions.values.unique()) == 3 * 6 * 4


def test_the_log_prob_is_normal_and_teaches_the_mean_and_the_std():
    policy = SchedulePolicy({"ratio": 0.8}, steps=2, std=0.3)
    raw = torch.tensor([[[1.0], [2.0]]])
    mean = math.log(0.8 / 0.2)
    expected = [-0.5 * ((x - mean) / 0.3) ** 2 - math.log(0.3) - 0.5 * math.log(2 * math.pi) for x in (1.0, 2.0)]
    log_prob = policy.log_prob(raw)
    torch.testing.assert_close(log_prob, torch.tensor([expected]), rtol=1e-5, atol=0)
    log_prob[0, 0].backward()
    assert policy.mean.grad[0, 0].item() == pytest.approx((1.0 - mean) / 0.09, rel=1e-5)
    assert policy.mean.grad[1, 0] == 0
    assert policy.log_std.grad[0, 0].item() == pytest.approx(((1.0 - mean) / 0.3) ** 2 - 1, rel=1e-5)
    both = SchedulePolicy({"ratio": 0.5, "temperature": 1.0}, steps=1, std=0.5)  # in the middle: logit 0
    each = [-0.5 * (x / 0.5) ** 2 - math.log(0.5) - 0.5 * math.log(2 * math.pi) for x in (0.3, -1.0)]
    assert both.log_prob(torch.tensor([[[0.3, -1.0]]])).item() == pytest.approx(sum(each), rel=1e-5)


def test_a_decode_follows_the_actions_of_each_row():
    policy = SchedulePolicy({"ratio": [0.7, 0.4, 0.3, 0.5], "temperature": 1.0}, steps=4, std=1e-6)
    decoder = build({"name": "scheduled", "steps": 4}, 8)
    rollout = decode(random_table(12), PROMPT, apply_actions(decoder, policy.draw(SEEDS)), SEEDS)
    # of 8 masks floor(8 x 0.3) go, of 6 floor(6 x 0.6), of 3 floor(3 x 0.7), then the last
    assert [row.bincount().tolist() for row in rollout.step_map] == [[2, 3, 2, 1]] * 3


def test_rows_have_schedules_of_their_own_and_only_what_happened_counts():
    policy = SchedulePolicy(START, steps=8, std=1.5)
    actions = policy.draw(SEEDS)
    decoder = apply_actions(build("scheduled", 8), actions)
    rollout = decode(random_table(12), PROMPT, decoder, SEEDS)
    alone = decode(
        random_table(12), PROMPT[1:2], apply_actions(build("scheduled", 8), policy.draw(SEEDS[1:2])), SEEDS[1:2]
    )
    assert torch.equal(alone.ids[0], rollout.ids[1])
    assert torch.equal(rollout.nfe, 2 * rollout.steps)  # guided
    assert len(set(rollout.steps.tolist())) > 1
    assert torch.equal(actions_taken(rollout, actions).sum(1), rollout.steps)


def test_an_action_without_a_place_is_refused():
    with pytest.raises(InputError, match="take the decoder scheduled"):
        apply_actions(build("low_confidence", 8), SchedulePolicy({"ratio": 0.5}, steps=4).draw(SEEDS))
    for start, said in (({"ration": 0.5}, "did you mean 'ratio'"), ({"ratio": 1.0}, r"between 0\.0 and 1\.0")):
        with pytest.raises(InputError, match=said):
            SchedulePolicy(start, steps=4)
