"""The flow in closed form, against numbers that were computed elsewhere."""

import json
from itertools import pairwise
from pathlib import Path

import gaussian_flow
import pytest
from gaussian_flow import gradient, schedule, step, whole_gradient

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "gaussian_flow.json").read_text())
SIGMAS = schedule()
LEVELS = {"ode": 0.0, "flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8, "manifold": 0.5}
REWARDS = ("linear", "quadratic")


def path(kernel, level, stochastic=range(9)):
    """The steps of a sampler that has a kernel at some of them, and ODE elsewhere."""
    kernels = [(kernel, level) if i in stochastic else ("ode", 0.0) for i in range(10)]
    return [step(*each, SIGMAS[i], SIGMAS[i + 1], SIGMAS[1]) for i, each in enumerate(kernels)]


def jumps(*stops):
    """ODE steps between some places of the schedule."""
    return [step("ode", 0.0, SIGMAS[i], SIGMAS[j], SIGMAS[1]) for i, j in pairwise(stops)]


def near(values):
    return pytest.approx(values, rel=1e-6, abs=1e-11)


def test_the_schedule_is_sd3s():
    assert near(KNOWN["sigmas"]) == SIGMAS


@pytest.mark.parametrize("name", LEVELS)
def test_steps_moments_and_gradients_are_the_known_ones(name):
    steps, known = path(name, LEVELS[name]), KNOWN["samplers"][name]
    assert [each.push for each in steps] == near(known["push"])
    assert [each.noise for each in steps] == near(known["noise"])
    assert [gaussian_flow.moments(steps[:i])[1] for i in range(11)] == near(known["variance"])
    for reward in REWARDS:
        found = whole_gradient(steps, reward)
        assert gaussian_flow.expected(steps, reward) == near(known[reward]["expected"])
        assert [each.theta for each in found] == near(known[reward]["theta"])
        assert [each.phi for each in found] == near(known[reward]["phi"])


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize(
    ("name", "kernel", "trunk", "ends"),
    [
        ("brush flow_sde", ("flow_sde", 0.7), "ode", lambda i: range(i, 11)),
        ("twigs full flow_sde", ("flow_sde", 0.7), "own", lambda i: range(i, 11)),
        ("twigs 1 flow_sde", ("flow_sde", 0.7), "own", lambda i: (i, 10)),
        ("window 0..2 flow_sde 0.8", ("flow_sde", 0.8), range(3), None),
        ("window 2..5 flow_sde 0.7", ("flow_sde", 0.7), range(2, 6), None),
        ("chain manifold last sde", ("manifold", 0.5), range(10), None),
    ],
)
def test_an_edge_sees_what_its_trunk_and_its_end_make_of_the_reward(reward, name, kernel, trunk, ends):
    known = KNOWN["edges"][f"{name} {reward}"]
    noisy = path(*kernel, range(10) if trunk == range(10) else range(9) if isinstance(trunk, str) else trunk)
    before = path("ode", 0.0) if trunk == "ode" else noisy
    for i, (theta, phi) in enumerate(zip(known["theta"], known["phi"], strict=True)):
        if noisy[i].noise == 0:
            continue
        after = noisy[i + 1 :] if ends is None else jumps(*ends(i + 1))
        found = gradient(before[:i], noisy[i], after, reward)
        assert (found.theta, found.phi) == near((theta, phi))
