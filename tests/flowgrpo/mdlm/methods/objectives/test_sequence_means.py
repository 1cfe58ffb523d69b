import math
from dataclasses import replace

import pytest
import torch

from flowgrpo.mdlm.methods.objectives.objective import LossInputs, SequenceRatio
from flowgrpo.mdlm.methods.objectives.sequence_means import clamp_tokens, hoelder_log_mean

GAP = torch.tensor(
    [[[0.6, -0.3, 0.1, 7.0]]], dtype=torch.float64
)  # of one answer of three tokens; the last is not scored
WEIGHT = torch.tensor([[[1.0, 1.0, 1.0, 0.0]]], dtype=torch.float64)


def inputs(gap, advantage):
    old = torch.full_like(gap, -2.0)
    return LossInputs(
        new=old + gap,
        old=old,
        reference=None,
        weight=WEIGHT.expand(gap.shape),
        view_weight=torch.ones(1),
        length=torch.full((gap.shape[1],), 3),
        advantage=torch.tensor(advantage, dtype=torch.float64),
        group=torch.zeros(gap.shape[1], dtype=torch.long),
        rank=torch.zeros(gap.shape[1]),
        token_weight=WEIGHT[0].expand(gap.shape[1:]) / 3,
        active_views=torch.ones(gap.shape[:2], dtype=torch.bool),
        order=torch.zeros(gap.shape[1:], dtype=torch.long),
    )


@pytest.mark.parametrize(
    ("power", "mean"),
    [
        (1.0, (math.exp(0.6) + math.exp(-0.3) + math.exp(0.1)) / 3),
        (-1.0, 3 / (math.exp(-0.6) + math.exp(0.3) + math.exp(-0.1))),
        (2.0, ((math.exp(1.2) + math.exp(-0.6) + math.exp(0.2)) / 3) ** 0.5),
        (1e-6, math.exp(0.4 / 3)),  # GSPO's geometric mean
    ],
)
def test_hoelder_means_by_hand(power, mean):
    assert hoelder_log_mean(GAP, WEIGHT, power).exp().tolist() == [pytest.approx(mean, rel=1e-5)]
    objective = SequenceRatio(power=power, clip_range=5.0)
    assert objective.loss(inputs(GAP, [-2.0])).item() == pytest.approx(2 * mean, rel=1e-5)


def test_a_larger_power_gives_a_larger_mean():
    means = [hoelder_log_mean(GAP, WEIGHT, power).item() for power in (-50.0, -1.0, -0.1, 0.1, 1.0, 50.0, 1e4)]
    assert means == sorted(means)
    assert means[-1] == pytest.approx(0.6, abs=1e-3)  # the largest log ratio


@pytest.mark.parametrize("power", [-2.0, 0.5, 1.0])
def test_a_token_pulls_by_the_power_of_its_ratio(power):
    """d M / d log r is M^(1 - p) r^p / T."""
    gap = GAP.clone().requires_grad_()
    mean = hoelder_log_mean(gap, WEIGHT, power).exp()
    (slope,) = torch.autograd.grad(mean.sum(), gap)
    expected = mean.detach() ** (1 - power) * (power * GAP).exp() / 3 * WEIGHT
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize("power", [-1.0, 1.0])
def test_views_count_by_their_weights_and_far_ratios_stay_finite(power):
    """Two views, of weights 2 and 1, of an answer; another answer has no scored token."""
    weight = torch.tensor([[[2.0], [0.0]], [[1.0], [0.0]]]).double()
    gap = torch.tensor([[[900.0], [3.0]], [[-900.0], [3.0]]]).double().requires_grad_()
    found = hoelder_log_mean(gap, weight, power)
    near = 900 + math.log(2 / 3) if power > 0 else -(900 + math.log(1 / 3))
    assert found.tolist() == pytest.approx([near, 0.0])
    (slope,) = torch.autograd.grad(found.sum(), gap)
    assert slope.isfinite().all()
    far = torch.tensor([[[-900.0 * power, 0.0]]]).double()
    assert hoelder_log_mean(far, torch.tensor([[[1.0, 0.0]]]), power).tolist() == [-900.0 * power]


@pytest.mark.parametrize(
    ("advantage", "moving", "clamped"),
    [(1.0, [0, 1, 1], [0.4, -0.3, 0.1]), (-1.0, [1, 0, 1], [0.6, -0.2, 0.1]), (0.0, [1, 1, 1], [0.6, -0.3, 0.1])],
)
def test_clamps_by_hand(advantage, moving, clamped):
    """Bounds of -0.2 and 0.4: of a good answer the first token is stopped, of a bad one the second."""
    free = GAP.clone().requires_grad_()
    found = clamp_tokens(free, torch.tensor([[advantage]]), 0.2, 0.4)
    assert found[0, 0, :3].tolist() == pytest.approx(clamped)
    (slope,) = torch.autograd.grad(found[..., :3].sum(), free)
    assert slope[0, 0, :3].tolist() == moving


def test_gmpo_clamps_tokens_before_their_geometric_mean_and_no_ratio_of_an_answer():
    """The first answer's ratio, exp(0.2 / 3), is beyond clip_range; an answer of stopped tokens alone has no gradient."""
    gap = torch.cat([GAP, torch.tensor([[[0.9, 0.8, 0.7, 0.0]]]).double()], 1)
    case = inputs(gap, [1.5, 1.5])
    case = replace(case, new=case.new.requires_grad_())
    objective = SequenceRatio(clamp=[0.2, 0.4], clip_range=1e-3)
    loss = objective.loss(case)
    first, second = math.exp((0.4 - 0.3 + 0.1) / 3), math.exp(0.4)
    assert loss.item() == pytest.approx(-1.5 * (first + second))
    (slope,) = torch.autograd.grad(loss, case.new)
    torch.testing.assert_close(slope[0, 0], torch.tensor([0, -1.5 * first / 3, -1.5 * first / 3, 0]).double())
    assert not slope[0, 1].any()
    assert objective.stopped(case).tolist() == [False, True]


@pytest.mark.parametrize("options", [{"power": 1.0}, {"power": -3.0}, {"clamp": 0.4}])
def test_where_nothing_has_moved_all_means_have_the_plain_gradient(options):
    case = inputs(torch.zeros_like(GAP), [2.0])
    case = replace(case, new=case.new.requires_grad_())
    slopes = [torch.autograd.grad(each.loss(case), case.new)[0] for each in (SequenceRatio(), SequenceRatio(**options))]
    torch.testing.assert_close(*slopes)
