"""An optimizer step on one process, and what is counted of its edges, by hand."""

import math

import pytest
import torch

from flowgrpo.training.weights.optimizer_step import UpdateStats, optimizer_step
from flowgrpo.training.weights.trained_weights import Weights


def stepped(gradient, max_grad_norm):
    """Two weights of 1 after a step of SGD of rate 0.1, and what is told of it."""
    weights, stats = Weights({"net": torch.nn.Linear(2, 1, bias=False)}, None), UpdateStats()
    (p,) = weights.parameters
    p.data.fill_(1.0)
    p.grad = torch.tensor([gradient])
    optimizer_step(
        weights,
        stats,
        optimizer=torch.optim.SGD([p], lr=0.1),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        max_grad_norm=max_grad_norm,
        reduce=None,
    )
    return p.detach()[0].tolist(), stats, weights.updates


@pytest.mark.parametrize(("most", "part"), [(10.0, 1.0), (2.5, 0.5)])
def test_a_gradient_is_cut_to_its_largest_norm(most, part):
    moved, stats, updates = stepped([3.0, 4.0], most)
    assert moved == pytest.approx([1 - 0.3 * part, 1 - 0.4 * part], rel=1e-5)
    assert (stats.grad_norm, stats.taken, stats.skipped, updates) == (pytest.approx(5.0), 1, 0, 1)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(broken):
    moved, stats, updates = stepped([3.0, broken], 1.0)
    assert moved == [1.0, 1.0]
    assert (stats.taken, stats.skipped, updates) == (0, 1, 0)


def test_edges_are_counted_over_calls():
    stats = UpdateStats()
    first, second = torch.tensor([0.5, -2.0, 0.0]), torch.tensor([0.25])
    stops, above = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    stats.measure(first, stops, above, divergence=torch.tensor([1.0, 2.0, 0.5]), step=3)
    stats.measure(second, torch.tensor([False]), torch.tensor([True]), divergence=torch.tensor([0.5]), step=3)
    assert (stats.edges, stats.clipped, stats.clipped_high) == (4, 2, 1)
    assert (stats.max_abs_log_ratio, stats.sum_abs_log_ratio, stats.kl) == (2.0, 2.75, 4.0)
    assert stats.by_step == {3: (4, 2.75, 4.0)}


def test_a_ratio_that_is_not_a_number_stays_the_largest():
    stats, none = UpdateStats(), torch.tensor([False])
    for ratio in (0.5, math.nan, 0.25):
        stats.measure(torch.tensor([ratio]), none, none)
    assert math.isnan(stats.max_abs_log_ratio)
    stats.measure(torch.tensor([9.0]), none, none, exact=False)
    assert math.isnan(stats.max_abs_log_ratio)
