import math
from typing import get_args

import pytest
import torch

from flowgrpo.training.advantages.clipped_ratio import Surrogate, surrogate_loss, surrogate_mask

SURROGATES = get_args(Surrogate)
LOW, HIGH = 0.1, 0.3
# ratio, advantage, and the weight w of each surrogate's gradient -A w grad log p
WEIGHTS = [
    (1.5, 2.0, {"clip": 0, "kept_gradient": 1.3, "frozen_ratio": 1.3, "tapered_ratio": 1}),
    (1.2, 2.0, {"clip": 1.2, "kept_gradient": 1.2, "frozen_ratio": 1.2, "tapered_ratio": 1}),
    (0.5, 2.0, {"clip": 0.5, "kept_gradient": 0.5, "frozen_ratio": 0.9, "tapered_ratio": 1}),
    (1.5, -2.0, {"clip": 1.5, "kept_gradient": 1.5, "frozen_ratio": 1.3, "tapered_ratio": 1}),
    (0.95, -2.0, {"clip": 0.95, "kept_gradient": 0.95, "frozen_ratio": 0.95, "tapered_ratio": 0.95}),
    (0.5, -2.0, {"clip": 0, "kept_gradient": 0.9, "frozen_ratio": 0.9, "tapered_ratio": 0.5}),
    (0.5, 0.0, {"clip": 0, "kept_gradient": 0, "frozen_ratio": 0, "tapered_ratio": 0}),
]


def loss_and_slope(surrogate, log_ratio, advantage):
    """The loss, and its derivative by the log-probability."""
    moved = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    loss = surrogate_loss(surrogate, moved, torch.tensor([advantage], dtype=torch.float64), [LOW, HIGH])
    return loss.item(), torch.autograd.grad(loss.sum(), moved)[0].item()


@pytest.mark.parametrize(("ratio", "advantage", "weights"), WEIGHTS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_gradients_of_surrogates_by_hand(surrogate, ratio, advantage, weights):
    _, slope = loss_and_slope(surrogate, math.log(ratio), advantage)
    assert slope == pytest.approx(-advantage * weights[surrogate])
    stopped = surrogate_mask(surrogate, torch.tensor([math.log(ratio)]), torch.tensor([advantage]), [LOW, HIGH])
    assert stopped.tolist() == [advantage != 0 and weights[surrogate] == 0]


@pytest.mark.parametrize(("ratio", "advantage", "weights"), WEIGHTS)
def test_the_values_of_surrogates_by_hand(ratio, advantage, weights):
    """PPO's are those of kept gradients; frozen ratios have -A times their weight."""
    ppo = max(-advantage * ratio, -advantage * min(max(ratio, 1 - LOW), 1 + HIGH))
    for surrogate in ("clip", "kept_gradient"):
        assert loss_and_slope(surrogate, math.log(ratio), advantage)[0] == pytest.approx(ppo)
    for surrogate in ("frozen_ratio", "tapered_ratio"):
        assert loss_and_slope(surrogate, math.log(ratio), advantage)[0] == pytest.approx(
            -advantage * weights[surrogate]
        )


@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_surrogates_are_the_policy_gradient_where_nothing_has_moved(surrogate, advantage):
    assert loss_and_slope(surrogate, 0.0, advantage) == (-advantage, -advantage)


def test_good_samples_are_learnt_however_unlikely_and_bad_ones_let_go():
    """TOPR, as p of a sample of old probability 0.5 goes to 0: d loss / dp is -A / p if A > 0, and -A / 0.5 if A < 0."""
    for p in (1e-2, 1e-4, 1e-12):
        good, bad = (loss_and_slope("tapered_ratio", math.log(p / 0.5), advantage)[1] / p for advantage in (1.0, -1.0))
        assert good == pytest.approx(-1 / p)
        assert bad == pytest.approx(2 if p > 1e-9 else 2 * math.exp(-20) / (p / 0.5))  # the ratio is bounded by e^-20


@pytest.mark.parametrize("log_ratio", [300.0, -300.0])
def test_gradients_stay_bounded_and_do_not_vanish_beyond_any_ratio(log_ratio):
    """Log ratios of whole answers may be of hundreds of nats."""
    advantage = math.copysign(1.0, log_ratio)  # the clip stops this edge
    assert loss_and_slope("clip", log_ratio, advantage)[1] == 0
    bound = 1 + HIGH if advantage > 0 else 1 - LOW
    for surrogate in ("kept_gradient", "frozen_ratio"):
        assert loss_and_slope(surrogate, log_ratio, advantage)[1] == pytest.approx(-advantage * bound)


def test_a_bad_sample_that_has_become_far_too_likely_is_lowered_by_kept_gradients():
    """PPO does not clip it; the bound of its ratio, exp(20), must not end its gradient."""
    assert loss_and_slope("kept_gradient", 300.0, -1.0)[1] == pytest.approx(math.exp(20))
