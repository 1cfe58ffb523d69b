"""Multistep solvers tend to the flow's own end, faster than Euler's method, and walk schedules of one step."""

import pytest
import torch
from gaussian_flow import MEAN, STD, schedule, velocity

from samplers.kernels import ODE
from samplers.plans import chain
from samplers.solvers import SOLVERS, solve
from samplers.trees import Root, grow

START = torch.linspace(-2, 2, 9)[:, None]


def field(state, sigma, rows):
    slope, shift = velocity(sigma)
    return tuple(slope * x + shift for x in state)


def ends(solver, steps, start=(START,), micro_batch=4, parts=(0,)):
    roots = [Root(0, i, None, parts[i % len(parts)]) for i in range(len(start[0]))]
    sigmas = torch.tensor(schedule(steps)).tolist()
    if solver == "euler":
        return grow(chain((ODE,) * steps, (), ()), sigmas, roots, start, field, None, micro_batch)
    return solve(solver, sigmas, roots, start, field, micro_batch)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solver_ends_where_the_flow_does_sooner_than_euler_s_method(solver):
    exact = MEAN + STD * START  # the flow of a Gaussian number keeps its quantile
    euler, own = ((ends(name, 40).samples[0] - exact).square().mean().sqrt() for name in ("euler", solver))
    assert own < euler / 5
    assert own < 0.01


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_steps_are_finite_and_the_first_is_euler_s(solver, steps):
    found = ends(solver, steps).samples[0]
    assert found.isfinite().all()
    if steps == 1:
        torch.testing.assert_close(found, ends("euler", 1).samples[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_each_tensor_of_a_state_and_each_batch_walks_by_itself(solver):
    both = ends(solver, 5, (START, 2 * START + 1), micro_batch=2, parts=(1, 0))
    for given, found in zip((START, 2 * START + 1), both.samples, strict=True):
        torch.testing.assert_close(found, ends(solver, 5, (given,), micro_batch=9).samples[0], rtol=0, atol=1e-5)
    assert [both.nodes[leaf].root.index for leaf in both.leaves] == list(range(9))
    assert sum(len(e.rows) for e in both.evaluations) == 9 * 5
    assert all(e.part in (0, 1) and not e.trained for e in both.evaluations)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solver_walks_the_sigmas_that_it_is_given_in_full_calls(solver):
    found = ends(solver, 3)
    seen = [(e.sigma, len(e.rows)) for e in found.evaluations]
    assert seen == [(sigma, size) for size in (4, 4, 1) for sigma in torch.tensor(schedule(3)[:-1]).tolist()]


def test_two_steps_of_dpm2_are_euler_s_method_on_the_log_of_the_odds():
    """Of first order both: x' = s'/s x - a' (e^-h - 1) x0, a = 1 - s, h the step of log a/s; and the last one ends in x0."""
    first, second, _ = torch.tensor(schedule(2), dtype=torch.float64).tolist()
    x = START.double()
    (velocity_there,) = field((x,), first, None)
    clean = x - first * velocity_there
    x = second / first * x + (1 - second) * clean  # e^-h is 0, for the log of the odds begins at -inf
    (velocity_there,) = field((x,), second, None)
    torch.testing.assert_close(ends("dpm2", 2).samples[0].double(), x - second * velocity_there, rtol=0, atol=1e-4)
