"""Effective sample sizes and truncated weights, by closed forms."""

import math

import pytest
import torch

from flowgrpo_engine import mismatch


def test_a_weight_is_the_ratio_cut_at_the_most():
    found = mismatch.clip_weights(torch.tensor([0.1, -0.2, 0.7]).double(), 2.0)
    assert found.tolist() == pytest.approx([math.exp(0.1), math.exp(-0.2), 2.0])


def test_equal_weights_have_the_whole_effective_size_and_one_alone_the_least():
    assert mismatch.effective(torch.full((5,), -7.0)) == pytest.approx(1)
    assert mismatch.effective(torch.tensor([0.0, -80.0, -90.0, -100.0])) == pytest.approx(0.25)
