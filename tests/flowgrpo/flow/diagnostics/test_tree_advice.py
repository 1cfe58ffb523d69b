"""Which tree is advised for a spectrum and for what things cost."""

import pytest

from flowgrpo.flow.diagnostics.spectrum import VarianceShare
from flowgrpo.flow.diagnostics.tree_advice import Seconds, advise, check

CHEAP = Seconds(step=1.0, draw=3.0, score=2.0)


def shares(start, *steps, width=8):
    parts = [None, *((i * width, (i + 1) * width) for i in range(len(steps)))]
    return [
        VarianceShare(steps=part, share=share, error=0.03) for part, share in zip(parts, (start, *steps), strict=True)
    ]


def test_chains_are_advised_where_the_first_steps_decide():
    early = shares(0.5, 0.4, 0.1, 0.0)
    assert advise(early, 24, CHEAP).split is None
    assert "algorithm.preset=awm_fast" in check(early, 24, CHEAP).value


def test_a_split_is_advised_above_the_part_that_decides_most():
    """One of 16 to 23 has the variance 0.22 + 0.51 of chains' 1, and four samples share nine of 24 steps."""
    found = advise(shares(0.0, 0.27, 0.51, 0.22), 24, CHEAP)
    signal, variance = 0.51**2 + 0.22**2, 0.73
    chains = (0.27**2 + signal) / (24 + 6 * 3 + 2)
    late = signal / variance / (9 / 4 + 15 + 4 * 3 + 2)
    assert found.split == 8
    assert found.gain == pytest.approx((late / chains) ** 0.5)
    said = check(shares(0.0, 0.27, 0.51, 0.22), 24, CHEAP).value
    assert "split at step 8: later steps decide 73% ± 4%" in said
    assert said.endswith("algorithm.preset=awm_late algorithm.tree.splits=[8] algorithm.likelihood.steps=[8,-2]")


def test_later_splits_are_advised_the_more_a_step_costs():
    late = shares(0.0, 0.1, 0.25, 0.65)
    assert advise(late, 24, CHEAP).split == 16
    free = Seconds(step=0.0, draw=0.0, score=1.0)
    costly = Seconds(step=1.0, draw=0.0, score=0.0)
    assert advise(late, 24, costly).gain > advise(late, 24, free).gain


def test_a_small_late_part_is_no_reason_for_a_split():
    assert advise(shares(0.3, 0.3, 0.0, 0.4), 24, CHEAP).split is None
