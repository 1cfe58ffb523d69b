"""Which tree is advised for a spectrum and for what things cost."""

import shlex
from dataclasses import replace

import pytest

from flowgrpo import config
from flowgrpo.flow.diagnostics.spectrum import VarianceShare
from flowgrpo.flow.diagnostics.tree_advice import Seconds, advise, check

CHEAP = Seconds(step=1.0, draw=3.0, score=2.0)


def whole(split):
    """One step decides what all later steps decide."""
    return 1.0


def shares(start, *steps, width=8):
    parts = [None, *((i * width, (i + 1) * width) for i in range(len(steps)))]
    return [
        VarianceShare(steps=part, share=share, error=0.03) for part, share in zip(parts, (start, *steps), strict=True)
    ]


def test_chains_are_advised_where_the_first_steps_decide():
    early = shares(0.5, 0.4, 0.1, 0.0)
    assert advise(early, 24, CHEAP, whole).split is None
    assert "preset: awm_fast" in check(early, 24, CHEAP, whole).value


def test_a_split_is_advised_above_the_part_that_decides_most():
    """Four samples share nine of 24 evaluations, and all draws lie in 14 of the 21 steps that chains draw from."""
    parts = shares(0.0, 0.27, 0.51, 0.22)
    found = advise(parts, 24, CHEAP, whole)
    late = 0.51**2 + 0.22**2 - 2 * 0.03**2
    chains = (late + 0.27**2 - 0.03**2) / (21 * (4 * (24 + 6 * 3 + 2)) ** 0.5)
    assert found.split == 8
    assert found.gain == pytest.approx(late / (14 * (0.73 * (9 + 4 * (15 + 6 * 3 + 2))) ** 0.5) / chains)
    said = check(parts, 24, CHEAP, whole).value
    assert "split at step 8: later steps decide 73% ± 4%" in said


def test_the_model_is_near_what_was_measured_on_patterns():
    """Gains of a second over those of chains, see docs/comparison.md: 1.46 at step 8; no split at 16, where it was 0.63."""
    parts = shares(0.0, 0.27, 0.51, 0.22)
    assert advise(parts, 24, CHEAP, whole).gain == pytest.approx(1.46, abs=0.22)


def test_a_split_whose_one_step_decides_less_is_worth_less():
    parts = shares(0.0, 0.27, 0.51, 0.22)
    most = advise(parts, 24, CHEAP, whole).gain
    assert advise(parts, 24, CHEAP, lambda split: 0.73 * 0.8).gain == pytest.approx(most * 0.8**0.5)
    assert advise(parts, 24, CHEAP, lambda split: 0.2).split is None


def test_a_split_is_worth_more_the_more_a_step_costs():
    late = shares(0.0, 0.1, 0.65, 0.25)
    free = Seconds(step=0.0, draw=0.0, score=1.0)
    costly = Seconds(step=1.0, draw=0.0, score=0.0)
    assert advise(late, 24, costly, whole).gain > advise(late, 24, free, whole).gain


@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_shares_within_their_errors_advise_no_split(noise):
    parts = [replace(each, error=noise) for each in shares(0.0, 0.2, 0.25, 0.25)]
    assert advise(parts, 24, CHEAP, whole).split is None


@pytest.mark.parametrize(("steps", "width"), [(24, 8), (10, 1)])
def test_what_is_advised_is_a_valid_setting(steps, width):
    late = shares(0.0, 0.1, *([0.9 / (steps // width - 2)] * (steps // width - 2)), width=width)
    for parts in (late, shares(0.9, 0.1, 0.0)):
        advised = advise(parts, steps, CHEAP, whole)
        overrides = [*shlex.split(advised.overrides), f"model.call.num_inference_steps={steps}"]
        settings = config.load("configs/shapes.yaml", overrides)
        likelihood = settings.algorithm.likelihood
        first, end = likelihood.span(steps)
        assert end - first >= likelihood.draws
