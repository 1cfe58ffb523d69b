"""The flow of two Gaussians, against numbers that were computed elsewhere."""

import json
from itertools import pairwise
from pathlib import Path

import mixture_flow
import pytest
from gaussian_flow import step
from mixture_flow import REWARDS, SIGMAS

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "mixture_flow.json").read_text())
PAIRS = list(pairwise(SIGMAS))
ODE = [step("ode", 0.0, *pair, SIGMAS[1]) for pair in PAIRS]
CHAIN = [step("flow_sde", 0.7, *pair, SIGMAS[1]) for pair in PAIRS[:-1]] + ODE[-1:]


def near(values):
    return pytest.approx(values, rel=2e-6, abs=1e-8)


@pytest.mark.parametrize("reward", REWARDS)
def test_what_samples_earn_and_its_gradient_are_the_known_ones(reward):
    known, earned = KNOWN[reward], REWARDS[reward]
    expected, theta = mixture_flow.of_ode(ODE, earned)
    assert expected == near(known["ode"])
    assert theta == near(known["ode_theta"])
    expected, theta = mixture_flow.of_chain(CHAIN, earned)
    assert expected == near(known["chain"])
    assert theta == near(known["chain_theta"])
    assert mixture_flow.of_branches(CHAIN, ODE, earned, mixture_flow.ode_trunk(ODE)) == near(known["brush_theta"])
