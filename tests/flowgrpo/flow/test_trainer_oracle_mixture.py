"""Chains, brushes and twigs on a mixture of two Gaussians climb what is exact there."""

import functools

import oracle_mixture
import pytest
from gaussian_flow import cosine
from oracle_mixture import FAMILIES, REWARDS, exact, rows
from oracle_page import check_known, numbers, on_page

PLAIN = ("tempflow", "soft")  # in every run of the suite, which tries each rule of advantage on one Gaussian
CASES = [
    pytest.param(family.preset, reward, marks=() if (family.preset, reward) == PLAIN else pytest.mark.zoo)
    for family in FAMILIES
    for reward in REWARDS
]


@functools.cache
def of(preset, reward):
    family = next(family for family in FAMILIES if family.preset == preset)
    return {each.name: each for each in rows(family, reward)}


@pytest.mark.parametrize(("preset", "reward"), CASES)
def test_an_update_has_the_size_and_the_direction_of_the_sums(preset, reward):
    check_known(of(preset, reward).values())


@pytest.mark.zoo
def test_no_baseline_turns_the_shifts_of_a_chain():
    for each in of("flow_grpo", "soft").values():
        assert each.turned < 4, each
        assert each.to_chain > 0.98


@pytest.mark.zoo
def test_a_cut_of_advantages_takes_size_where_rewards_are_far_apart():
    found = of("flow_grpo", "quadratic")
    assert (
        found["`flow_grpo`, quadratic, advantages cut at 5"].size < 0.95 * found["`flow_grpo`, quadratic, uncut"].size
    )


@pytest.mark.parametrize("reward", ["soft", pytest.param("quadratic", marks=pytest.mark.zoo)])
def test_branches_climb_what_ode_samples_earn(reward):
    ode, chain = exact("ode", reward), exact("chain", reward)
    assert cosine(chain, ode) < 0.987
    for sees in ("brush", "twigs"):
        assert cosine(exact(sees, reward), ode) > 0.9994 > 0.99 > cosine(exact(sees, reward), chain)


@pytest.mark.parametrize(("preset", "reward"), CASES)
def test_the_page_has_the_table(preset, reward):
    there = on_page("A mixture of two Gaussians")
    _, _, *lines = oracle_mixture.table([*of(preset, reward).values()])
    for line in lines:
        assert numbers(line) == pytest.approx(numbers(there[line.split("|")[1].strip()]), abs=0.021, rel=0.03)
