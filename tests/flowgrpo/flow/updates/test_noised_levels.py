"""Draws of unequal noise levels in one call: full calls, and the gradients and log ratios of one level a call."""

import pytest
import tiny
import torch
from cases import cases
from field import MANY_DRAWS, Network, credit, settings, step_in_place, trainer
from opened import Opened

from flowgrpo import config
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.flow.trainer import flow_loop
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward

# Losses with and without an anchor, coupled in a group and in a step, pulled to two policies, and of trees that split.
PRESETS = ("nft", "awm", "awm_split", "crd", "dgpo", "rvm", "dpo", "ram")
PLAIN = ("nft", "awm_split", "crd", "dgpo")


def of_field(folder, preset, likelihood=(), **overrides):
    few = {"draws": 3} if preset in MANY_DRAWS else {}
    algorithm = {"preset": preset, "likelihood": {**few, **dict(likelihood)}}
    sizes = {"train__group_size": 4, "train__groups": 3, "train__updates": 1, "train__micro_batch": 5}
    return trainer(settings(folder, algorithm=algorithm, **{**sizes, **overrides}))


def of_pipeline(folder, name, preset, **call):
    """A run of a tiny pipeline, all of whose weights are trained."""
    chosen = config.validate(
        {
            "model": {"path": "model", "lora": None},
            "algorithm": {"preset": preset, "likelihood": {"draws": 2}},
            "train": {"groups": 2, "group_size": 3, "updates": 1, "micro_batch": 4, "draft": None},
            "eval": {"save": 0},
            "run": {"name": "r", "dir": str(folder)},
        }
    )
    policy, algorithm = DiffusersPolicy(tiny.PIPELINES[name](), {**tiny.CALLS[name], **call}), chosen.algorithm
    weights = Weights(
        policy.modules, None, ema=None, reference=algorithm.reference, old=algorithm.old, bank=algorithm.bank
    )
    chosen.run.folder.mkdir(parents=True, exist_ok=True)
    prompts = [Prompt("a red circle"), Prompt("a blue square of two circle")]
    rewards = [Reward("mean", lambda images, prompts: [float(image.mean()) for image in images])]
    return Opened(flow_loop(chosen, policy, weights, train_prompts=prompts, rewards=rewards))


def shift(run):
    """Move the policy away from its anchor."""
    with torch.no_grad():
        for i, p in enumerate(run.weights.parameters):
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))


def in_both_ways(run, *, moved):
    """Return the noised samples, the statistics and the gradient of an update, in mixed calls and in one level a call."""
    batch, policy, found = run.rollout(0, run.groups(0)), run.policy, []
    if moved:
        shift(run)
    for mixes in (policy.mixes_levels, lambda rows: False):
        policy.mixes_levels = mixes
        credited = credit(run, batch)
        stats = step_in_place(run, credited)
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in run.weights.parameters]
        found.append((credited.noised, stats, torch.cat([slope.flatten() for slope in slopes])))
    return found


def check(found):
    (mixed, _, gradient), (apart, _, expected) = found
    assert any(isinstance(call.sigma, torch.Tensor) for call in mixed.calls)
    assert all(isinstance(call.sigma, float) for call in apart.calls)
    draws, others = ([draw for call in each.calls for draw in call.draws] for each in (mixed, apart))
    assert len(draws) == len(others)
    assert set(draws) == set(others)
    assert expected.norm() > 0
    assert (gradient - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.parametrize("preset", cases(PRESETS, PLAIN))
def test_a_field_s_gradient_is_that_of_one_level_a_call(tmp_path, preset):
    check(in_both_ways(of_field(tmp_path, preset), moved=True))


@pytest.mark.parametrize(("name", "preset"), [("sd3", "nft"), ("flux", "nft"), ("sd3", "ram")])
def test_a_pipeline_s_gradient_is_that_of_one_level_a_call(tmp_path, name, preset):
    check(in_both_ways(of_pipeline(tmp_path, name, preset), moved=True))


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_before_the_first_step_every_log_ratio_of_mixed_calls_is_exactly_0(tmp_path, name):
    (noised, stats, _), _ = in_both_ways(of_pipeline(tmp_path, name, "nft"), moved=False)
    assert any(isinstance(call.sigma, torch.Tensor) for call in noised.calls)
    assert (stats.ratios, stats.sum_abs_log_ratio) == (12, 0.0)


def test_a_loop_that_doubles_its_batch_for_guidance_has_one_level_a_call(tmp_path):
    run = of_pipeline(tmp_path, "sd3_guided", "nft")
    run.config = run.config.model_copy(update={"model": run.config.model.model_copy(update={"guidance": "pipeline"})})
    noised = credit(run, run.rollout(0, run.groups(0))).noised
    assert all(isinstance(call.sigma, float) for call in noised.calls)


@pytest.mark.parametrize("preset", ["awm_fast", "nft", "dpo"])
def test_calls_are_full_and_the_plan_counts_them(tmp_path, preset):
    run = of_field(tmp_path, preset, train__updates=3, train__groups=6, train__group_size=6)
    (mixed, _, _), (apart, _, _) = in_both_ways(run, moved=False)
    for part in range(3):
        *full, last = [len(call.draws) for call in mixed.of_part(part)]
        assert set(full) <= {5}
        assert 0 < last <= 5
        groups = [mixed.node(draw).root.group for call in mixed.of_part(part) for draw in call.draws]
        assert groups == sorted(groups)
    cost = predict_cost(run.config, len(run.policy.sigmas) - 1)
    assert (cost.update_batches, cost.level_batches) == (len(mixed.calls), len(apart.calls))
    assert cost.update_batches < cost.level_batches


class FirstTime(Network):
    """A field that heeds the time of the first row alone."""

    def forward(self, x, sigma, rows):
        return super().forward(x, sigma[:1].expand(len(x)), rows)


def test_a_field_that_heeds_one_time_has_one_level_a_call(tmp_path):
    run = trainer(settings(tmp_path, algorithm={"preset": "nft"}), field=FirstTime())
    noised, before = credit(run, run.rollout(0, run.groups(0))).noised, run.policy.evaluations
    assert all(isinstance(call.sigma, float) for call in noised.calls)
    assert not run.policy.mixes_levels([Row("a", 0)])
    assert run.policy.evaluations == before
