from collections import Counter

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from samplers import noise
from samplers.schedule import euler_sigmas, linear_sigmas, random_steps, random_window, shifted, sliding_window, spread


def test_shift_is_the_published_formula_and_keeps_the_ends():
    sigmas = linear_sigmas(10, shift=3.0)
    expected = [1, 0.9643, 0.9231, 0.8750, 0.8182, 0.7500, 0.6667, 0.5625, 0.4286, 0.2500, 0]
    assert sigmas.dtype == torch.float32
    assert sigmas.tolist() == pytest.approx(expected, abs=5e-5)
    assert torch.equal(shifted(sigmas, 1.0), sigmas)


@pytest.mark.parametrize("shift", [1.0, 1.15, 3.0])
@pytest.mark.parametrize("train_steps", [1000, 300])
def test_euler_sigmas_are_diffusers_to_the_last_bit(shift, train_steps):
    scheduler = FlowMatchEulerDiscreteScheduler(train_steps, shift)
    for num_steps in (1, 2, 10, 28):
        scheduler.set_timesteps(num_steps)
        assert torch.equal(euler_sigmas(num_steps, shift, train_steps), scheduler.sigmas)


def test_random_windows_reach_every_place_and_no_other():
    windows = [random_window(3, 1, 6, noise.generator("w", i)) for i in range(300)]
    counts = Counter(window.start for window in windows)
    assert counts.keys() == {1, 2, 3}
    assert all(len(window) == 3 for window in windows)
    assert min(counts.values()) > 60


def test_a_sliding_window_moves_and_then_stays():
    windows = [sliding_window(4, 0, 9, i, every=10, stride=2) for i in range(0, 60, 10)]
    assert [w.start for w in windows] == [0, 2, 4, 5, 5, 5]
    assert sliding_window(4, 0, 9, 9, every=10, stride=2).start == 0


def test_random_steps_are_drawn_without_repeats_and_sorted():
    drawn = [random_steps(range(15), 9, noise.generator("s", i)) for i in range(50)]
    assert all(len(set(steps)) == 9 and set(steps) <= set(range(15)) for steps in drawn)
    assert all(list(steps) == sorted(steps) for steps in drawn)
    assert set().union(*drawn) == set(range(15))


def test_steps_are_spread_from_the_first_to_the_last():
    assert spread(4, 10) == [0, 3, 6, 9]
    assert spread(3, 6) == [0, 2, 5]  # 2.5 to the even one
    assert spread(1, 6) == [0]
