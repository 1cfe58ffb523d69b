"""Rollouts that are behind are made by the weights of so many iterations before, and a resume goes on with the same ones."""

import shutil

import pytest
import torch
from field import lines, nearness, settings, trainer, weights_of

from flowgrpo.training.checkpoints.checkpoint import find


def begun(folder, lag=0, **changes):
    pick = {"by": "variance", "budget": "knapsack", "robust": 1.0}  # groups depend on what is known of the prompts
    return trainer(
        settings(folder, run__staleness=lag, prompts__pick=pick, train__replay="always", **changes), reward=nearness
    )


def behind_by_hand(folder, lag):
    """A run whose rollouts are made with weights, and of groups, that were put aside so many iterations before."""
    run, stood = begun(folder), []
    real_rollout, real_groups = run.rollout, run.groups

    def groups(iteration):
        known, run.prompt_stats.seen = run.prompt_stats.seen, dict(stood[max(0, iteration - lag)][1])
        found = real_groups(iteration)
        run.prompt_stats.seen = known
        return found

    def rollout(iteration, groups):
        now = [p.detach().clone() for p in run.weights.parameters]
        put(stood[max(0, iteration - lag)][0])
        found = real_rollout(iteration, groups)
        put(now)
        return found

    @torch.no_grad()
    def put(values):
        for p, value in zip(run.weights.parameters, values, strict=True):
            p.copy_(value)

    real_iterate = run.iterate

    def iterate():
        stood.append(([p.detach().clone() for p in run.weights.parameters], dict(run.prompt_stats.seen)))
        return real_iterate()

    run.rollout, run.groups, run.iterate = rollout, groups, iterate
    run.run()
    return run


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.zoo), 3])
def test_rollouts_are_by_the_weights_and_the_prompts_of_so_many_iterations_before(tmp_path, lag):
    by_hand = behind_by_hand(tmp_path / "hand", lag)
    run = begun(tmp_path / "own", lag)
    run.run()
    assert lines(run) == lines(by_hand)
    for name, tensor in weights_of(by_hand).items():
        assert torch.equal(weights_of(run)[name], tensor)
    drifts = [line["policy/max_abs_log_ratio"] for line in lines(run)]
    assert (max(drifts) == 0.0) == (lag == 0)
    assert drifts[0] == 0.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is two iterations behind."""
    run = begun(tmp_path_factory.mktemp("whole"), 2)
    run.run()
    return run


@pytest.mark.parametrize("step", [1, 4])
def test_a_resume_rolls_out_by_the_versions_of_its_checkpoint(tmp_path, whole, step):
    shutil.copytree(whole.folder, tmp_path / "r")
    for later in range(step + 1, 7):
        shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{later:06d}")
    rest = begun(tmp_path, 2)
    rest.resume()
    assert rest.done == step
    rest.run()
    assert lines(rest) == lines(whole)
    for name, tensor in weights_of(whole).items():
        assert torch.equal(weights_of(rest)[name], tensor)


def test_only_a_run_that_is_behind_keeps_versions(tmp_path):
    for lag in (0, 2):
        run = begun(tmp_path / str(lag), lag, train__iterations=4)
        run.run()
        kept = find(tmp_path / str(lag) / "r" / "checkpoints") / "versions.safetensors"
        assert kept.exists() == (lag > 0)
        assert len(run.versions.kept) == (3 if lag else 0)


@pytest.mark.parametrize("lag", [0, 2])
def test_noise_is_calibrated_by_what_stands(tmp_path, lag):
    """Its rounds come before the first iteration."""
    run = begun(
        tmp_path, lag, train__iterations=3, algorithm={"preset": "dense_grpo", "kernel": {"calibrate": {"rounds": 2}}}
    )
    run.run()
    assert run.levels is not None
    assert run.done == 3
