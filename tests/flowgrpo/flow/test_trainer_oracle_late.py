"""Trees of final samples on a reward that late steps decide, see docs/research/oracle.md."""

import math
from functools import cache

import pytest
from oracle_late import METHODS, REWARDS, SPLIT, expected
from oracle_late import see as see_once

from flowgrpo.flow.methods.presets import PRESETS

CHAINS, LATE, SIBLINGS, _ = METHODS
BATCHES = 30
see = cache(see_once)


@pytest.mark.parametrize("reward", REWARDS)
def test_below_a_split_a_draw_gets_what_its_noise_level_decides(reward):
    seen, exact = see(SIBLINGS, reward, BATCHES), expected(reward, PRESETS["awm_split"]["baseline"]["scale"])
    late = slice(SPLIT, -1)
    assert ((seen.mean - exact).abs()[late] < 3 * seen.error[late]).all()
    assert (seen.error[late] < 0.1 * exact.abs()[late]).all()
    assert not seen.mean[:SPLIT].any()


@pytest.mark.parametrize("reward", REWARDS)
def test_trees_are_less_noisy_than_chains_where_late_steps_decide(reward):
    def thousand(method):
        seen = see(method, reward, BATCHES)
        return seen.noise * math.sqrt(seen.evaluations / 1000)

    tree = thousand(SIBLINGS)
    assert tree < 0.9 * thousand(LATE)
    assert tree < 0.7 * thousand(CHAINS)
