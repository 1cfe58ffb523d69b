"""Weights of tokens that an engine drew, and what is told of the mismatch, by numbers from closed forms."""

import math

import pytest
import torch

from flowgrpo_engine.mismatch import metrics
from flowgrpo_engine.text import correction

OLD = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, 0.0, 0.0]]).double()
ENGINE = torch.tensor([[-1.1, -1.8, -2.0], [-1.3, math.nan, math.nan]]).double()
SCORED = torch.tensor([[True, True, True], [True, False, False]])


def test_a_token_weighs_its_ratio_cut_at_the_most_and_one_that_was_not_drawn_weighs_one():
    found = correction.token_weights(OLD, ENGINE, 2.0)
    assert found.flatten().tolist() == pytest.approx([math.exp(0.1), math.exp(-0.2), 2.0, math.exp(0.3), 1.0, 1.0])


def test_the_mismatch_is_told_of_tokens_and_of_whole_answers():
    told = metrics([correction.mismatch(OLD, ENGINE, SCORED, 2.0)])
    assert told["engine/mean_abs_log_ratio"] == pytest.approx(2.1 / 4)
    assert told["engine/max_abs_log_ratio"] == pytest.approx(1.5)
    assert told["engine/kl"] == pytest.approx(-1.7 / 4)
    assert told["engine/kl_joint"] == pytest.approx(-(1.4 + 0.3) / 2)
    assert told["engine/truncated_fraction"] == 0.25
    assert told["engine/mean_weight"] == pytest.approx((math.exp(0.1) + math.exp(-0.2) + 2 + math.exp(0.3)) / 4)
    joint = torch.tensor([1.4, 0.3]).double().exp()
    assert told["engine/effective_samples_joint"] == pytest.approx(float(joint.sum() ** 2 / (joint**2).sum() / 2))


def test_tokens_that_are_not_trained_on_are_not_told_of():
    only = SCORED & torch.tensor([True, False, False])
    assert correction.mismatch(OLD, ENGINE, only, 2.0).each.tolist() == pytest.approx([0.1, 0.3])
