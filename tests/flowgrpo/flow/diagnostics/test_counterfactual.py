"""What other noise would have given, against a Gaussian flow, of which every step's part is known exactly."""

import functools
import math
from itertools import pairwise

import oracle
import pytest
import torch
from field import MANY_DRAWS
from gaussian_flow import MEAN, step
from oracle import SIGMAS

from flowgrpo.data.prompts import Row
from flowgrpo.flow.diagnostics.counterfactual import explain
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.rollouts.rollout import rollout
from rewards import Reward
from samplers.trees import Root

ROW = Row("", 11)
STEPS = [step("flow_sde", 0.7, *pair, SIGMAS[1]) for pair in pairwise(SIGMAS[:-1])]
STEPS.append(step("ode", 0.0, *pairwise(SIGMAS[-2:]).__next__(), SIGMAS[1]))
REACH = [math.prod(each.slope for each in STEPS[i + 1 :]) for i in range(len(STEPS))]  # of a step's noise to the sample


def explained(preset, *, reward=lambda x: x, row=ROW, **options):
    """The explanation of a preset's sample on the Gaussian flow, whose pictures are of one colour."""
    changed = {"algorithm.likelihood.draws": 3} if preset in MANY_DRAWS else {}
    baseline = PRESETS[preset]["baseline"]
    changed |= {} if "std" in baseline else {"algorithm.baseline": dict(baseline)}
    with oracle.trainer(preset, "linear", **changed) as run:
        run.policy._decode = lambda x: x[..., None, None].expand(-1, 3, 2, 2)
        called = [Reward("mine", lambda pictures, prompts: reward(pictures[:, 0, 0, 0]).tolist())]
        found = explain(run.config, run.policy, called, row, **{"redraws": 4, "chains": 6, **options})
        return found, run


def test_the_shares_are_those_of_the_noises_and_add_up():
    found, _ = explained("flow_grpo", redraws=3, chains=150)
    parts = [(each.noise * reach) ** 2 for each, reach in zip(STEPS, REACH, strict=True)][:-1]
    total = sum(parts)
    assert found.variance == pytest.approx(total, rel=0.15)
    assert [each.index for each in found.steps] == list(range(len(STEPS) - 1))
    for each, part in zip(found.steps, parts, strict=True):
        assert abs(each.share.share - part / total) < 3 * each.share.error
        assert 0 < each.share.error < 0.15
        assert each.share.steps[0] == each.index
    assert sum(each.share.share for each in found.steps) == pytest.approx(1 - found.residual.share)
    assert abs(found.residual.share) < 2 * found.residual.error


@functools.cache
def of_many_redraws():
    found, _ = explained("flow_grpo", redraws=400)
    return found


def test_redraws_of_a_step_spread_as_its_noise_does():
    found = of_many_redraws()
    for each, own, reach in zip(found.steps, STEPS, REACH, strict=False):
        assert each.std == pytest.approx(own.noise)
        assert each.deviation == pytest.approx(own.noise * abs(reach), rel=0.15)


def test_means_over_redraws_of_each_step_give_the_sample_back():
    """The sample is the path without noise plus what each step's own noise adds; each redraw mean leaves one of them out."""
    found = of_many_redraws()
    added = [found.sample.reward - sum(look.reward for look in each.redraws) / 400 for each in found.steps]
    (start,) = oracle.FieldPolicy(oracle.Shifted(), (1,), SIGMAS).start([ROW])
    mean = float(start)
    for each in STEPS:
        mean = each.slope * mean + each.shift
    error = math.sqrt(sum((own.noise * reach) ** 2 for own, reach in zip(STEPS, REACH, strict=True)) / 400)
    assert abs(mean + sum(added) - found.sample.reward) < 4 * error


def test_the_sample_of_a_chain_is_the_method_s_own():
    found, run = explained("flow_grpo", iteration=3)
    kernels = run.config.algorithm.kernel.kernels(len(SIGMAS) - 1)
    plan = run.config.algorithm.plan(kernels, 8, 0, 3)
    called = [Reward("mine", lambda pictures, prompts: pictures[:, 0, 0, 0].tolist())]
    _, scores = rollout(run.policy, plan, [Root(0, 0, ROW)], rewards=called, micro_batch=8, seed=0, iteration=3)
    assert found.sample.reward == pytest.approx(float(scores.values[0, 0]), abs=1e-6)
    assert found.still.reward != pytest.approx(found.sample.reward, abs=1e-3)
    assert not found.lent
    assert len({each.advantage for each in found.steps}) == 1  # the reward of the end, for every edge
    again, _ = explained("flow_grpo", iteration=3)
    assert [look.reward for look in again.steps[4].redraws] == [look.reward for look in found.steps[4].redraws]
    other, _ = explained("flow_grpo", iteration=4)
    assert other.sample.reward != found.sample.reward


def test_the_last_state_foretells_the_sample_and_states_follow_each_other():
    found, _ = explained("flow_grpo")
    *_, last = found.steps
    assert last.after.reward == pytest.approx(found.sample.reward, abs=1e-5)  # one ODE step is left
    assert all(one.after is other.before for one, other in pairwise(found.steps))
    # From a start, x - v is its mean: the model foretells that of the data, whatever the start.
    assert found.steps[0].before.reward == pytest.approx(MEAN, abs=1e-5)


def test_a_brush_credits_each_step_by_itself():
    found, _ = explained("tempflow")
    advantages = [each.advantage for each in found.steps]
    assert len(found.steps) == len(SIGMAS) - 2
    assert len(set(advantages)) == len(advantages)
    assert all(math.isfinite(each) for each in advantages)


def test_a_method_without_noise_is_lent_some():
    found, _ = explained("awm")
    assert found.lent
    assert len(found.steps) == len(SIGMAS) - 2
    assert {each.kernel for each in found.steps} == {"flow_sde 0.7"}
    assert len({each.advantage for each in found.steps}) == 1
    assert found.steps[0].advantage is not None


def test_equal_rewards_have_no_shares():
    found, _ = explained("flow_grpo", reward=torch.ones_like)
    assert (found.variance, found.residual) == (0.0, None)
    assert {each.share for each in found.steps} == {None}
    assert {each.deviation for each in found.steps} == {0.0}


def test_a_lost_reward_is_left_out():
    partly = lambda x: x.where((1000 * x).long() % 3 > 0, torch.nan)  # noqa: E731
    found, _ = explained("flow_grpo", reward=partly, redraws=40, chains=20)
    lost = [look for each in found.steps for look in each.redraws if look.reward is None]
    assert lost
    assert all(each.deviation is not None for each in found.steps)
    assert found.lost > 0
    assert all(math.isfinite(each.share.share) for each in found.steps)


def test_too_few_known_rewards_tell_no_shares():
    found, _ = explained("flow_grpo", reward=lambda x: torch.full_like(x, torch.nan))
    assert found.lost == 6 * 10
    assert (found.variance, found.residual, {each.share for each in found.steps}) == (0.0, None, {None})


@pytest.mark.parametrize("preset", [name for name, row in PRESETS.items() if row["objective"]["name"] != "distill"])
def test_every_preset_can_be_explained(preset):
    found, run = explained(preset, redraws=2, chains=3, iteration=1)
    assert found.steps
    assert all(len(each.redraws) == 2 for each in found.steps)
    assert found.of_steps == len(SIGMAS) - 1
    assert found.evaluations == run.policy.evaluations
    assert any(each.advantage is not None for each in found.steps)


def test_the_shape_of_a_tree_that_adapts_and_calibrated_levels_are_the_checkpoint_s():
    levels = [0.3] * (len(SIGMAS) - 2)
    calibrated, _ = explained("dense_grpo", rollout_state=levels)
    assert {each.kernel for each in calibrated.steps} == {"flow_sde 0.3"}
    state = {"squares": [1.0] * 9, "freedom": [1.0] * 9, "shapes": {"0": [2] * 9}}
    adapted, _ = explained("adaptive", rollout_state=state)
    plain, _ = explained("adaptive")
    assert adapted.evaluations < plain.evaluations
