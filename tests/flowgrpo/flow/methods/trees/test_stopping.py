"""Which chains are stopped, and with which axes they may be."""

import math

import pytest
import torch

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.flow.methods.trees.stopping import survival_chances, survivors
from flowgrpo.flow.planning.iteration_forecast import predict_cost

LEAVE_ONE_OUT = {"name": "leave_one_out"}


def validated(preset="flow_grpo", stop=None, baseline=LEAVE_ONE_OUT, **sections):
    algorithm = {"preset": preset, "tree": {"stop": stop or {"step": 2}}, "baseline": baseline}
    algorithm |= sections.pop("algorithm", {})
    written = {"model": {"path": "field", "lora": None}, "algorithm": algorithm, **sections}
    written["train"] = {"groups": 4, "group_size": 8, "updates": 2, **sections.get("train", {})}
    return config.validate(written)


def test_chances_follow_the_distance_from_the_mean_within_their_bounds():
    foretold = torch.tensor([-1.0, 0.0, 0.5, 4.0, -8.0, 4.5])  # of mean 0
    chances = survival_chances(foretold, 0.5, 0.25)
    assert float(chances.mean()) == pytest.approx(0.5)
    assert chances[[0, 1, 2]].tolist() == [0.25] * 3
    assert chances[4] == pytest.approx(min(1, float(chances[3]) * 2))
    assert float(chances[5] / chances[3]) == pytest.approx(4.5 / 4)
    assert chances.dtype == torch.float64


def test_equal_or_unknown_rewards_give_equal_chances():
    for foretold in ([0.3] * 4, [math.nan] * 4):
        assert survival_chances(torch.tensor(foretold), 0.6, 0.25).tolist() == [0.6] * 4
    chances = survival_chances(torch.tensor([0.0, math.nan, 2.0, 1.0]), 0.5, 0.25)  # NaN and 1 are the mean
    assert chances.tolist() == pytest.approx([0.75, 0.25, 0.75, 0.25])


def test_chances_reach_their_mean_where_few_differ():
    chances = survival_chances(torch.tensor([0.0] * 15 + [16.0]), 0.75, 0.25)
    assert float(chances.mean()) == pytest.approx(0.75)
    assert chances[-1] == 1


def test_draws_have_addresses_and_the_chances():
    chances = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    each = [survivors(chances, [(7, "stop", i, 0, place) for place in range(3)]) for i in range(2000)]
    assert torch.stack(each).double().mean(0).tolist() == pytest.approx(chances.tolist(), abs=0.04)
    torch.testing.assert_close(survivors(chances[2:], [(7, "stop", 5, 0, 2)]), each[5][2:])


def test_a_floor_above_what_is_kept_is_refused():
    with pytest.raises(
        InputError, match=r"stop\.floor: chances of at least 0\.5 keep more than 0\.4, take 0\.4 or less"
    ):
        validated(stop={"step": 1, "keep": 0.4})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"preset": "nft"}, r"algorithm\.tree\.stop: elbo trains on final samples, but"),
        ({"preset": "tempflow"}, r"algorithm\.tree\.stop: unknown key"),
        ({"algorithm": {"credit": "depthwise"}}, r"algorithm\.credit: .* take terminal"),
        ({"baseline": "group_mean"}, r"algorithm\.baseline: with algorithm\.tree\.stop group_mean would bias"),
        ({"baseline": {**LEAVE_ONE_OUT, "std": "global"}}, r"algorithm\.baseline: .*leave_one_out with std: global"),
        ({"baseline": {**LEAVE_ONE_OUT, "combine": "worst"}}, r"algorithm\.baseline\.combine: .*worst"),
        ({"baseline": {**LEAVE_ONE_OUT, "drop_zero": True}}, r"algorithm\.baseline\.drop_zero: .* take false"),
        ({"train": {"select": {"rule": "extremes"}}}, r"train\.select: .* take null"),
        ({"train": {"split": "edges"}}, r"train\.split: .* take groups or samples"),
        ({"run": {"processes": 8}, "train": {"split": "samples"}}, r"whole because of algorithm\.tree\.stop"),
    ],
)
def test_what_would_bias_the_update_is_refused(changed, sentence):
    with pytest.raises(InputError, match=sentence):
        validated(**changed)


def test_a_distillation_has_no_rewards_to_stop_by():
    algorithm = {"objective": {"kl": {"beta": 1.0, "reference": "teacher"}}}
    with pytest.raises(InputError, match=r"algorithm\.tree\.stop: distill trains without rewards"):
        validated("opd", algorithm=algorithm)


def test_a_step_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"stop\.step: 6 leaves nothing to save of 6 steps, take at most 5"):
        predict_cost(validated(stop={"step": 6}), 6)


@pytest.mark.parametrize("preset", ["flow_grpo", "mix_grpo"])
def test_a_plan_counts_the_expected_chains(preset):
    kl = {"objective": {"kl": {"beta": 0.0}}}
    cost = predict_cost(validated(preset, {"step": 2, "keep": 0.75, "floor": 0.5}, algorithm=kl), 6)
    whole = predict_cost(validated(preset, algorithm={**kl, "tree": {}}), 6)
    assert (cost.stopped, cost.saved) == (8, 32)
    assert cost.rollout == whole.rollout - 8 * 4 == 32 * 6 - 32
    assert cost.update == whole.update * 3 // 4
    assert cost.decoded == 32 + 24
