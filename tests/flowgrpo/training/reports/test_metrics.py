"""What a metric line says of the policy, from what was counted of edges."""

import pytest
import torch

from flowgrpo.training.reports.metrics import of_policy
from flowgrpo.training.weights.optimizer_step import UpdateStats


def alone(objects):
    return objects


def counted(step, log_ratio, clipped, divergence=None, above=None):
    stats = UpdateStats(taken=1, grad_norm=1.0)
    apart = None if divergence is None else torch.tensor(divergence)
    ratio = torch.tensor(log_ratio)
    above = ratio > 0 if above is None else torch.tensor(above)
    stats.measure(ratio, torch.tensor(clipped), above, divergence=apart, step=step)
    return stats


def test_a_stopped_edge_is_counted_on_the_side_of_its_ratio():
    stats = counted(0, [0.5, -0.25, -0.5, 0.0], [True, True, False, False])
    found = of_policy([stats], alone)
    assert found["policy/clip_fraction"] == 0.5
    assert (found["policy/clip_fraction_high"], found["policy/clip_fraction_low"]) == (0.25, 0.25)
    assert found["policy/mean_abs_log_ratio"] == pytest.approx(1.25 / 4)
    assert found["policy/kl"] is None
    # The first is stopped by what came before it.
    assert counted(0, [-0.5, -0.25], [True, True], above=[True, False]).clipped_high == 1


def test_ratio_and_divergence_are_told_by_step_over_all_updates_and_processes():
    mine = [counted(3, [0.5, 0.25], [False, False], [1.0, 3.0]), counted(0, [1.0], [False], [5.0])]
    other = [counted(3, [0.0], [False], [8.0])]
    found = of_policy(mine, lambda objects: [*objects, other])
    assert found["policy/mean_abs_log_ratio/step_4"] == pytest.approx(0.25)  # 0.75 of three edges
    assert found["policy/kl/step_4"] == pytest.approx(4.0)
    assert found["policy/mean_abs_log_ratio/step_1"] == 1.0
    assert found["policy/kl/step_1"] == 5.0
    assert found["policy/kl"] == pytest.approx(17 / 4)


def test_a_loss_is_a_mean_over_edges_and_null_where_it_says_nothing():
    stats = [UpdateStats(taken=1, grad_norm=1.0) for _ in range(2)]
    for each, loss in zip(stats, ([1.0, 2.0], [6.0]), strict=True):
        zeros = torch.zeros(len(loss))
        each.measure(zeros, zeros.bool(), zeros.bool(), divergence=torch.ones(len(loss)), loss=torch.tensor(loss))
    found = of_policy(stats, alone)
    assert (found["policy/loss"], found["policy/kl"]) == (3.0, 1.0)
    assert of_policy([counted(0, [0.5], [False])], alone)["policy/loss"] is None


def test_a_ratio_that_can_be_nothing_but_1_is_null():
    stats, zeros = UpdateStats(taken=1), torch.zeros(3)
    stats.measure(zeros, zeros.bool(), zeros.bool(), exact=False, anchored=False)
    found = of_policy([stats], alone)
    assert {found[f"policy/{key}"] for key in ("mean_abs_log_ratio", "clip_fraction", "clip_fraction_high")} == {None}
    assert of_policy([UpdateStats()], alone)["policy/mean_abs_log_ratio"] == 0  # nothing was trained


def test_edges_of_no_step_are_counted_together_alone():
    found = of_policy([counted(None, [0.5], [False])], alone)
    assert found["policy/mean_abs_log_ratio"] == 0.5
    assert not [key for key in found if "step_" in key]
