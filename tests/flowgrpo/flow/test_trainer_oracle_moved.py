"""What updates climb where the oracle's other rows do not go: off the anchor, beyond all cuts, and on a guided flow.

The reward is linear, so that an advantage is a number times how far a sample lies above the others.
"""

import math
from itertools import pairwise

import pytest
import torch
from field import credit, step_in_place
from gaussian_flow import moments, velocity, whole_gradient
from oracle import SIGMAS, Shifted, _step, mean_and_std, replay, trainer
from oracle_samples import DENSITY, GRID, SCHEDULE, SEED
from oracle_stale import placed

SIZE, GROUPS, BATCHES = 8, 8, 24
SHARE = 1 - 1 / SIZE
MOVED = 0.3  # by which theta is moved between rollout and update
SCALE = {"epg": 0.1, "nft": 1.0, "crd": 1.0, "ram": 1.0}
MOST = 5.0  # advantage that is cut, and that is surely good
GUIDANCE = 2.5
PAIRS = list(pairwise(SIGMAS))
STEPS = range(len(PAIRS))
pytestmark = pytest.mark.usefixtures("noise_drawn_once")


class Guided(Shifted):
    """The shifted velocity of `Shifted`, guided away from the exact one of standard normal data."""

    def forward(self, x, sigma, rows):
        pairs = torch.tensor([unconditional(SIGMAS[_step(level)]) for level in sigma.tolist()])
        slope, shift = pairs[:, :, None].unbind(1)
        return (1 - GUIDANCE) * (slope * x + shift) + GUIDANCE * super().forward(x, sigma, rows)


def unconditional(sigma):
    """Slope and shift of the exact velocity of standard normal data."""
    return (2 * sigma - 1) / ((1 - sigma) ** 2 + sigma**2), 0.0


def guided(sigma):
    """Slope and shift of the guided velocity."""
    pairs = zip(unconditional(sigma), velocity(sigma), strict=True)
    return tuple((1 - GUIDANCE) * without + GUIDANCE * own for without, own in pairs)


def chain(kernel, level, of=velocity):
    """The steps of a chain, the last one by ODE, of a velocity."""
    gaps = [[there - here for there, here in zip(of(s), velocity(s), strict=True)] for s in SIGMAS[:-1]]
    return placed(kernel, level, [shift for _, shift in gaps], [slope for slope, _ in gaps])


def samples_update(preset, *, moved=0.0, model=None, earned=None):
    """By step the mean over batches and the standard error of an update by theta, over the preset's scale."""
    plain = {**SCHEDULE, **SEED, "algorithm.kernel": "ode", "algorithm.likelihood.weight": "velocity"}
    with trainer(preset, "linear", groups=GROUPS, model=model, earned=earned, **plain) as run:
        theta, found = run.policy.modules["field"].theta, []
        for iteration in range(BATCHES):
            run.done = iteration
            batch = run.rollout(iteration, run.groups(iteration))
            theta.data += moved
            credited = credit(run, batch)
            step_in_place(run, credited)
            theta.data -= moved
            draws = [_step(draw.sigma) for call in credited.noised.calls for draw in call.draws]
            found.append([float(-theta.grad[i]) * len(draws) / draws.count(i) / SCALE[preset] for i in STEPS])
    return with_errors(found)


def with_errors(rows):
    mean, spread = mean_and_std(rows)
    return mean, [own / math.sqrt(len(rows)) for own in spread]


def samples_told(preset, advantage, *, moved=0.0, of=velocity, factor=1.0):
    """What that is in expectation, by step.

    With e the velocity's error at the anchor, d how far it has moved since and A the advantage: A exp(ell) 2 (-e - d) of
    `epg`, ell = e^2 - (e + d)^2; -2 A e - 10 d of `nft`; -2 A (e + d) + 20 (ell - mean ell)(e + d) of `crd`; -2 A e - 2 d of
    `ram`.

    Args:
        advantage: in expectation, of the distance of a sample from their mean in standard deviations.
        factor: of theta in the velocity.
    """
    mean, variance = moments(chain("ode", 0.0, of))
    std, density = math.sqrt(variance), DENSITY[:, None] * DENSITY
    above, x0 = advantage(GRID, std)[:, None], (mean + std * GRID)[:, None]
    now = {}
    for i in STEPS:
        slope, shift = of(SIGMAS[i])
        e = slope * ((1 - SIGMAS[i]) * x0 + SIGMAS[i] * GRID) + shift - (GRID - x0)
        now[i] = e, e.square() - (e + moved).square()
    middle = sum(float((density * ell).sum()) for _, ell in now.values()) / len(now)
    forms = {
        "epg": lambda e, ell: -2 * above * ell.exp() * (e + moved),
        "nft": lambda e, ell: -2 * above * e - 2 * MOST * moved,
        "crd": lambda e, ell: (-2 * above + 4 * MOST * (ell - middle)) * (e + moved),
        "ram": lambda e, ell: -2 * above * e - 2 * moved,
    }
    return [factor * float((density * forms[preset](*now[i])).sum()) for i in STEPS]


def above_the_group(standard, std):
    """The mean of its group taken off, the sample in it."""
    return SHARE * std * standard


def cut(standard, std):
    """Beyond all cuts: `MOST` times the mean sign of the distance from the mean of a group."""
    return MOST * torch.erf(standard * math.sqrt((SIZE - 1) / 2))


def check(found, told):
    mean, error = found
    assert max(abs(own - each) / by for own, each, by in zip(mean, told, error, strict=True)) < 4
    square = sum(each**2 for each in told)
    size = sum(own * each for own, each in zip(mean, told, strict=True)) / square
    off = math.sqrt(sum((by * each) ** 2 for by, each in zip(error, told, strict=True))) / square
    assert abs(size - 1) < 3 * off < 0.25


@pytest.mark.parametrize(
    "preset", ["epg", "nft", "crd", pytest.param("ram", marks=pytest.mark.zoo)]
)  # pulled as nft is
def test_off_its_anchor_an_update_is_what_its_formula_says(preset):
    told = samples_told(preset, above_the_group, moved=MOVED)
    check(samples_update(preset, moved=MOVED), told)
    still = samples_told(preset, above_the_group)
    assert max(abs(there - here) for there, here in zip(told, still, strict=True)) > 0.05  # so that it matters


@pytest.mark.parametrize("preset", ["epg", pytest.param("nft", marks=pytest.mark.zoo)])  # by the same cut of advantages
def test_rewards_beyond_all_cuts_are_signs(preset):
    check(samples_update(preset, earned=lambda x: 1000 * x), samples_told(preset, cut))


def test_final_samples_of_a_guided_flow_are_fitted_by_the_guided_velocity():
    told = samples_told("epg", above_the_group, of=guided, factor=GUIDANCE)
    check(samples_update("epg", model=Guided()), told)


def trajectories_update(**options):
    with trainer("flow_grpo", "linear", groups=GROUPS, **options) as run:
        seen = [replay(run, run.made(iteration))[0] for iteration in range(BATCHES)]
    return with_errors([[own[i].theta for i in STEPS[:-1]] for own in seen])


def test_the_edges_of_a_guided_flow_climb_what_it_earns():
    told = whole_gradient(chain("flow_sde", 0.7, guided), "linear")[:-1]
    check(trajectories_update(model=Guided()), [SHARE * GUIDANCE * each.theta for each in told])


def test_edges_whose_advantages_are_cut_climb_the_mean_sign():
    """The mean sign of x minus the mean of its group moves with the mean of x by sqrt(2 (1 - 1 / K) / pi) / std."""
    steps = chain("flow_sde", 0.7)
    factor = MOST * math.sqrt(2 * SHARE / math.pi / moments(steps)[1])
    told = [factor * each.theta for each in whole_gradient(steps, "linear")[:-1]]
    check(trajectories_update(earned=lambda x: 1000 * x), told)
