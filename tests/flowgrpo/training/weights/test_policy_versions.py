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
    real_rollout, real_groups, real_iterate = run.rollout, run.groups, run.iterate

    def groups(iteration):
        known, run.prompt_stats.seen = run.prompt_stats.seen, dict(stood[max(0, iteration - lag)][1])
        found = real_groups(iteration)
        run.prompt_stats.seen = known
        return found

    def rollout(iteration, groups):
        now = [p.detach().clone() for p in run.weights.parameters]
        run.weights.put(stood[max(0, iteration - lag)][0])
        found = real_rollout(iteration, groups)
        run.weights.put(now)
        return found

    def iterate():
        stood.append(([p.detach().clone() for p in run.weights.parameters], dict(run.prompt_stats.seen)))
        return real_iterate()

    run.rollout, run.groups, run.iterate = rollout, groups, iterate
    run.run()
    return run


def same(one, other):
    assert lines(one) == lines(other)
    for name, tensor in weights_of(other).items():
        assert torch.equal(weights_of(one)[name], tensor)


@pytest.mark.parametrize("lag", [*(pytest.param(lag, marks=pytest.mark.zoo) for lag in (0, 1)), 3])
def test_rollouts_are_by_the_weights_and_the_prompts_of_so_many_iterations_before(tmp_path, lag):
    by_hand = behind_by_hand(tmp_path / "hand", lag)
    run = begun(tmp_path / "own", lag)
    run.run()
    same(run, by_hand)
    kept = find(run.folder / "checkpoints") / "versions.safetensors"
    assert kept.exists() == (lag > 0)
    assert len(run.versions.kept) == (lag + 1 if lag else 0)
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
    same(rest, whole)


@pytest.mark.parametrize("lag", [0, 2])
def test_noise_is_calibrated_by_what_stands(tmp_path, lag):
    """Its rounds come before the first iteration."""
    run = begun(
        tmp_path, lag, train__iterations=3, algorithm={"preset": "dense_grpo", "kernel": {"calibrate": {"rounds": 2}}}
    )
    run.run()
    assert run.levels is not None
    assert run.done == 3
