"""Weights of edges that another policy rolled out, and what is told of the mismatch, by numbers from closed forms."""

import math

import credited
import pytest
import torch

from flowgrpo_engine import mismatch
from flowgrpo_engine.flow import correction
from samplers.kernels import Kernel, cps
from samplers.plans import chain

LEVEL = 0.3


def rolled(form="mean", gaps=(0.1, -0.2, 0.3, 1.5), kernel="dance_sde"):
    """Two samples of two trained steps, and the engine's log-probabilities, which are so far below ours."""
    tree = credited.tree(chain([Kernel(kernel, LEVEL, form)] * 3, range(2), range(2)), groups=1, size=2)
    engine, left = torch.full((len(tree.nodes),), math.nan, dtype=torch.float64), iter(gaps)
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            engine[edges.nodes] = edges.log_prob.double() - torch.tensor([next(left) for _ in edges.nodes]).double()
    return tree, engine


def of_trained(tree, values):
    return [
        values[node].item() for evaluation in tree.evaluations for edges in evaluation.trained for node in edges.nodes
    ]


def test_an_edge_weighs_its_ratio_cut_at_the_most():
    tree, engine = rolled()
    weights = correction.edge_weights(tree, engine, 2.0)
    assert of_trained(tree, weights) == pytest.approx([math.exp(0.1), math.exp(-0.2), math.exp(0.3), 2.0])
    untrained = [i for i, node in enumerate(tree.nodes) if node.parent is None or node.step == 3]
    assert weights[untrained].tolist() == [1.0] * 4
    told = mismatch.metrics([correction.mismatch(tree, engine, 2.0)])
    assert told["engine/truncated_fraction"] == 0.25
    assert told["engine/mean_weight"] == pytest.approx((math.exp(0.1) + math.exp(-0.2) + math.exp(0.3) + 2) / 4)


def test_the_mismatch_of_means_is_told_per_dimension_and_of_whole_samples():
    """Samples of 2 dimensions: their joint log-ratios are 2 (0.1 + 0.3) and 2 (-0.2 + 1.5)."""
    told = mismatch.metrics([correction.mismatch(*rolled(), 2.0)])
    assert told["engine/mean_abs_log_ratio"] == pytest.approx(2.1 / 4)
    assert told["engine/max_abs_log_ratio"] == pytest.approx(1.5)
    assert told["engine/kl"] == pytest.approx(-1.7 / 4)
    assert told["engine/kl_joint"] == pytest.approx(-(0.8 + 2.6) / 2)
    ratios = torch.tensor([0.1, -0.2, 0.3, 1.5]).double().exp()
    assert told["engine/effective_samples"] == pytest.approx(float(ratios.sum() ** 2 / (ratios**2).sum() / 4))
    joint = torch.tensor([0.8, 2.6]).double().exp()
    assert told["engine/effective_samples_joint"] == pytest.approx(float(joint.sum() ** 2 / (joint**2).sum() / 2))


def test_sums_and_means_of_one_mismatch_are_told_alike_but_weigh_otherwise():
    mean, total = (
        correction.mismatch(*rolled(form, gaps), 2.0) for form, gaps in (("mean", (0.1,) * 4), ("sum", (0.2,) * 4))
    )
    left, right = mismatch.metrics([mean]), mismatch.metrics([total])
    assert right["engine/kl_joint"] == pytest.approx(left["engine/kl_joint"])
    assert right["engine/mean_abs_log_ratio"] == pytest.approx(left["engine/mean_abs_log_ratio"])
    assert right["engine/mean_weight"] == pytest.approx(left["engine/mean_weight"] ** 2)


def test_a_form_without_constants_is_told_as_the_density_that_it_stands_for():
    """-mean(e^2) over 2 std^2 is the mean log-density but for a constant."""
    tree, engine = rolled("constant_free", (0.01,) * 4, "cps")
    told = correction.mismatch(tree, engine, 2.0)
    stds = [cps(s, after, LEVEL, 0.75).std for s, after in ((1.0, 0.75), (0.75, 0.5))]
    expected = [0.01 / (2 * std**2) for std in stds for _ in range(2)]
    assert told.each.tolist() == pytest.approx(expected, rel=1e-5)
    assert told.joint.tolist() == pytest.approx([2 * (expected[0] + expected[2])] * 2, rel=1e-5)
    assert told.weights.tolist() == pytest.approx([math.exp(0.01)] * 4)


def test_edges_without_a_finite_number_are_left_out_and_ratios_of_thousands_of_nats_are_no_infinity():
    tree, engine = rolled(gaps=(0.1, math.nan, 3000.0, -3000.0))
    told = mismatch.metrics([correction.mismatch(tree, engine, 2.0)])
    assert told["engine/max_abs_log_ratio"] == pytest.approx(3000)
    assert told["engine/effective_samples"] == pytest.approx(1 / 3)
    assert all(math.isfinite(value) for value in told.values())
    nothing = mismatch.metrics([correction.mismatch(*rolled(gaps=(math.nan,) * 4), 2.0)])
    assert set(nothing.values()) == {None}
