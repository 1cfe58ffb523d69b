"""Which draws and which tree are advised for a spectrum and for what things cost."""

import shlex
from dataclasses import replace

import pytest

from flowgrpo import config
from flowgrpo.flow.diagnostics.spectrum import VarianceShare
from flowgrpo.flow.diagnostics.tree_advice import OF_DRAWS, Seconds, advise, check

CHEAP = Seconds(step=1.0, draw=3.0, score=2.0)


def whole(split):
    """One step decides what all later steps decide."""
    return 1.0


def shares(start, *steps, width=8):
    parts = [None, *((i * width, (i + 1) * width) for i in range(len(steps)))]  # the last step has noise here
    return [
        VarianceShare(steps=part, share=share, error=0.03) for part, share in zip(parts, (start, *steps), strict=True)
    ]


def test_usual_draws_are_advised_where_the_first_steps_decide():
    early = shares(0.5, 0.4, 0.1, 0.0)
    advised = advise(early, 24, CHEAP, whole)
    assert (advised.first, advised.splits, advised.gain) == (None, False, 1.0)
    assert "take chains: a split is not predicted" in check(early, 24, CHEAP, whole).value


def test_late_draws_are_advised_from_a_margin_on():
    even = shares(0.0, 0.33, 0.34, 0.33)
    assert advise(even, 24, CHEAP, lambda split: 0.2).first is None
    assert 1 < chains(8, 0.34, 0.33) / chains(1, 0.33, 0.34, 0.33) < OF_DRAWS


def test_a_share_below_zero_is_no_signal():
    late = shares(0.0, 0.1, 0.6, 0.3)
    below = shares(0.0, -0.3, 0.6, 0.3)
    none = shares(0.0, 0.0, 0.6, 0.3)
    gains = [advise(each, 24, CHEAP, whole).gain for each in (late, none, below)]
    assert gains[0] < gains[1] == gains[2]


def chains(first, *late, error=0.03):
    """The prediction for chains of 24 steps whose draws begin at `first`, up to what all have in common."""
    return sum(share**2 - error**2 for share in late) / (22 - first)


def test_late_draws_are_advised_above_the_part_that_decides_most():
    """All draws lie in 14 of the 21 steps that chains draw from otherwise."""
    parts = shares(0.0, 0.27, 0.51, 0.22)
    found = advise(parts, 24, CHEAP, whole)
    assert (found.first, found.splits) == (8, False)
    assert found.gain == pytest.approx(chains(8, 0.51, 0.22) / chains(1, 0.27, 0.51, 0.22))
    assert "with draws from step 8 on: later steps decide 73% of the variance" in check(parts, 24, CHEAP, whole).value


def test_the_model_is_near_what_was_measured_on_patterns():
    """Gains of a second over those of chains, see docs/research/comparison.md: 1.19 ± 0.23 by draws from step 8 on."""
    assert advise(shares(0.0, 0.27, 0.51, 0.22), 24, CHEAP, whole).gain == pytest.approx(1.19, abs=0.06)


LATE = shares(0.0, 0.4, 0.45, 0.15)  # much is decided above a split, and more below it
COSTLY = Seconds(step=1.0, draw=0.1, score=0.1)


def test_a_split_is_advised_where_it_spares_much_of_the_variance_and_of_the_evaluations():
    """Four samples share nine of 24 evaluations, and compare themselves by 0.6 of the variance."""
    found = advise(LATE, 24, COSTLY, whole)
    late, usual = chains(8, 0.45, 0.15), chains(1, 0.4, 0.45, 0.15)
    assert (found.first, found.splits) == (8, True)
    group, alone = 9 + 4 * (15 + 6 * 0.1 + 0.1), 4 * (24 + 6 * 0.1 + 0.1)
    assert found.gain == pytest.approx(late / usual * (alone / (0.6 * group)) ** 0.5)
    said = check(LATE, 24, COSTLY, whole).value
    assert "split at step 8: later steps decide 60% of the variance" in said
    assert "preset: awm_late" in said


def test_a_split_whose_one_step_decides_less_is_worth_less():
    most = advise(LATE, 24, COSTLY, whole).gain
    assert advise(LATE, 24, COSTLY, lambda split: 0.6 * 0.98).gain == pytest.approx(most * 0.98**0.5)
    assert not advise(LATE, 24, COSTLY, lambda split: 0.2).splits


def test_no_split_is_advised_where_steps_cost_little():
    assert not advise(LATE, 24, Seconds(step=0.0, draw=1.0, score=1.0), whole).splits


@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_shares_within_their_errors_advise_nothing(noise):
    parts = [replace(each, error=noise) for each in shares(0.0, 0.2, 0.25, 0.25)]
    assert advise(parts, 24, CHEAP, whole).first is None


@pytest.mark.parametrize(("steps", "width"), [(24, 8), (10, 1)])
@pytest.mark.parametrize("seconds", [CHEAP, COSTLY])
def test_what_is_advised_is_a_valid_setting(steps, width, seconds):
    late = shares(0.0, 0.4, *([0.6 / (steps // width - 2)] * (steps // width - 2)), width=width)
    for parts in (late, shares(0.9, 0.1, 0.0)):
        advised = advise(parts, steps, seconds, whole)
        overrides = [*shlex.split(advised.overrides), f"model.call.num_inference_steps={steps}"]
        settings = config.load("configs/shapes.yaml", overrides)
        likelihood = settings.algorithm.likelihood
        first, end = likelihood.span(steps)
        assert first == (advised.first or 1)
        assert end - first >= likelihood.draws
