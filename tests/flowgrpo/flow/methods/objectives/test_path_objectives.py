"""The loss of an edge whose ratio is that of its path: values, gradients and stops by hand."""

import math

import pytest
import torch

from flowgrpo.flow.methods.objectives.path_objectives import PrefixRatio, TrajectoryRatio, prefix_log_ratio
from flowgrpo.flow.methods.objectives.policy_gradient import Clip, LossInputs

LOW, HIGH, DUAL = 0.1, 0.2, 0.3
BOUNDED = PrefixRatio(clip_range=[LOW, HIGH], dual=DUAL / HIGH)


def case(own, earlier, position, advantage):
    """One edge whose own log ratio is `own`, below trained steps whose log ratios sum to `earlier`; and its log_prob."""
    log_prob, old, earlier, advantage = (torch.tensor([x]).double() for x in (own - 1.5, -1.5, earlier, advantage))
    given = {"log_prob": log_prob.requires_grad_(), "old_log_prob": old, "advantage": advantage, "earlier": earlier}
    return LossInputs(**given, position=torch.tensor([position])), log_prob


def told(objective, *edge):
    """The loss of an edge, its derivative in the edge's log-probability, and whether the edge is said to be clipped."""
    inputs, log_prob = case(*edge)
    loss = objective.loss(inputs)
    (slope,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss.item(), slope.item(), objective.clipped(inputs).item()


@pytest.mark.parametrize(
    ("own", "earlier", "position", "advantage", "log_value", "moves"),
    [
        (0.05, 0.1, 1, 2.0, 0.15, True),  # inside: the whole path's ratio, with the gradient of the own step
        (0.05, 0.3, 1, 2.0, HIGH, False),  # a good edge gains nothing beyond the bound, the path's own step or not
        (0.05, 0.3, 4, 2.0, 0.35, True),  # which is twice as wide at the fourth step
        (0.15, 0.3, 4, 2.0, 2 * HIGH, False),
        (0.05, -0.9, 1, 2.0, -0.85, True),  # and is pulled back up from below
        (0.05, -0.1, 1, -2.0, -0.05, True),
        (-0.05, -0.1, 1, -2.0, -LOW, False),  # a bad edge is not pushed down below its bound
        (-0.05, -0.1, 4, -2.0, -0.15, True),
        (-0.15, -0.1, 4, -2.0, -2 * LOW, False),
        (0.0, 0.25, 1, -2.0, 0.25, True),  # beyond high it is pushed down still, up to the dual bound
        (0.0, 0.35, 1, -2.0, DUAL, False),
        (0.0, 0.55, 4, -2.0, 0.55, True),
        (0.0, 0.65, 4, -2.0, 2 * DUAL, False),
    ],
)
def test_the_path_s_ratio_is_clipped_by_bounds_that_grow_as_the_root_of_its_steps(
    own, earlier, position, advantage, log_value, moves
):
    loss, slope, clipped = told(BOUNDED, own, earlier, position, advantage)
    value = -advantage * math.exp(log_value)
    assert loss == pytest.approx(value)
    assert slope == pytest.approx(value if moves else 0.0)
    assert clipped is not moves


@pytest.mark.parametrize(("power", "clipped"), [(0.0, True), (0.3, True), (0.5, False)])
def test_the_bounds_grow_by_the_power(power, clipped):
    objective = PrefixRatio(clip_range=[LOW, HIGH], power=power)
    assert told(objective, 0.1, 0.25, 4, 1.0)[2] is clipped  # 1.75 in units of `high`


def test_bad_edges_are_pushed_down_from_anywhere_without_a_dual_bound_and_edges_of_advantage_0_do_not_move():
    loss, slope, clipped = told(PrefixRatio(clip_range=[LOW, HIGH], dual=None), 0.5, 1.5, 4, -2.0)
    assert (loss, slope, clipped) == (pytest.approx(2 * math.e**2), pytest.approx(2 * math.e**2), False)
    assert told(PrefixRatio(clip_range=[LOW, HIGH]), 3.0, 3.0, 1, 0.0) == (0.0, 0.0, False)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("own", [-0.3, -0.05, 0.0, 0.05, 0.3])
def test_the_first_trained_step_has_the_plain_ratio(own, advantage):
    """With the clip of PPO where its bounds are the same: log(1 - low) and log(1 + high)."""
    ours = PrefixRatio(clip_range=[-math.log(0.9), math.log(1.2)], dual=None)
    assert told(ours, own, 0.0, 1, advantage) == pytest.approx(
        told(Clip(clip_range=[0.1, 0.2]), own, 0.0, 1, advantage)
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1e3, -1e3])
def test_a_ratio_beyond_any_bound_has_a_finite_loss_and_no_gradient(log_ratio, advantage):
    loss, slope, _ = told(PrefixRatio(), log_ratio, 0.0, 1, advantage)
    assert math.isfinite(loss)
    assert slope == 0


@pytest.mark.parametrize(("own", "earlier", "above"), [(0.05, -0.2, False), (-0.05, 0.2, True)])
def test_what_is_above_1_is_the_path_s_ratio_and_the_steps_before_enter_as_a_number(own, earlier, above):
    inputs, log_prob = case(own, earlier, 2, 1.0)
    assert BOUNDED.above(inputs).tolist() == [above]
    found = prefix_log_ratio(inputs)
    assert found.tolist() == pytest.approx([own + earlier])
    assert torch.autograd.grad(found.sum(), log_prob)[0].tolist() == [1.0]


def of_trajectory(objective, whole, length, advantage, own=0.7):
    """The loss of an edge of a trajectory of `length` steps, its derivative, and what is said of its ratio."""
    log_prob, old, advantage = (torch.tensor([x]).double() for x in (own - 1.5, -1.5, advantage))
    log_prob.requires_grad_()
    path = {"whole": torch.tensor([whole]).double(), "length": torch.tensor([length]).double()}
    inputs = LossInputs(log_prob=log_prob, old_log_prob=old, advantage=advantage, **path)
    loss = objective.loss(inputs)
    (slope,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss.item(), slope.item(), objective.clipped(inputs).item(), objective.above(inputs).item()


@pytest.mark.parametrize(
    ("options", "whole", "length", "advantage", "value", "slope"),
    [
        ({}, 0.4, 4.0, 2.0, -2 * math.exp(0.1), -2 * math.exp(0.1)),  # the mean of the steps, whatever the own one
        ({}, 0.4, 1.0, 2.0, -2 * 1.2, 0.0),
        ({"normalised": False}, 0.1, 4.0, 2.0, -2 * math.exp(0.1), -2 * math.exp(0.1)),
        ({"normalised": False}, 0.4, 4.0, 2.0, -2 * 1.2, 0.0),
        ({}, -0.8, 4.0, -2.0, 2 * 0.9, 0.0),
        ({}, -0.8, 4.0, 2.0, -2 * math.exp(-0.2), -2 * math.exp(-0.2)),
        ({"surrogate": "frozen_ratio"}, 0.4, 1.0, 2.0, -2 * 1.2, -2 * 1.2),
        ({"surrogate": "tapered_ratio", "normalised": False}, -0.4, 4.0, -2.0, 2 * math.exp(-0.4), 2 * math.exp(-0.4)),
    ],
)
def test_the_ratio_of_a_trajectory_is_clipped_as_one(options, whole, length, advantage, value, slope):
    found = of_trajectory(TrajectoryRatio(clip_range=[0.1, 0.2], **options), whole, length, advantage)
    assert found == (pytest.approx(value), pytest.approx(slope), slope == 0, whole > 0)
