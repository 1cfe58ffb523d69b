"""ODE steps of second order: the solver of diffusers, and the flow's own end sooner than by Euler's method, in any tree."""

import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from gaussian_flow import MEAN, STD, schedule, velocity

from samplers.growth import grow
from samplers.kernels import DPM2, ODE, Kernel
from samplers.plans import branch, chain, second_order
from samplers.second_order import SecondOrder
from samplers.trees import Move, Root

START = torch.linspace(-2, 2, 9)[:, None]


def sigmas(steps):
    return torch.tensor(schedule(steps)).tolist()


def field(state, sigma, rows):
    slope, shift = velocity(sigma)
    return tuple(slope * x + shift for x in state)


def grown(plan, steps, start=(START,), micro_batch=4, parts=(0,), noise=None):
    roots = [Root(0, i, None, parts[i % len(parts)]) for i in range(len(start[0]))]
    return grow(plan, sigmas(steps), roots, start, field, noise, micro_batch)


def chains(steps, order, **options):
    plan = chain((ODE,) * steps, (), ())
    return grown(second_order(plan) if order == 2 else plan, steps, **options)


def by_diffusers(steps, start=START):
    """The chain of the library's scheduler on the same sigmas."""
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero", solver_order=2
    )
    scheduler.set_timesteps(steps)
    scheduler.sigmas = torch.tensor(sigmas(steps))
    scheduler.timesteps = scheduler.sigmas[:-1] * scheduler.config.num_train_timesteps
    scheduler.set_begin_index(0)
    state = start
    for time, sigma in zip(scheduler.timesteps, sigmas(steps)[:-1], strict=True):
        (moved,) = field((state,), sigma, [None])
        state = scheduler.step(moved, time, state, return_dict=False)[0]
    return state


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 20])
def test_chains_are_those_of_diffusers(steps):
    torch.testing.assert_close(chains(steps, 2).samples[0], by_diffusers(steps), rtol=0, atol=2e-6)


def test_a_chain_ends_where_the_flow_does_sooner_than_by_euler_s_method():
    exact = MEAN + STD * START  # the flow of a Gaussian number keeps its quantile
    euler, own = ((chains(40, order).samples[0] - exact).square().mean().sqrt() for order in (1, 2))
    assert own < euler / 5
    assert own < 0.01


def test_each_tensor_of_a_state_and_each_batch_walks_by_itself():
    both = chains(5, 2, start=(START, 2 * START + 1), micro_batch=2, parts=(1, 0))
    order = [both.nodes[leaf].root.index for leaf in both.leaves]
    for given, found in zip((START, 2 * START + 1), both.samples, strict=True):
        assert torch.equal(found, chains(5, 2, start=(given,), micro_batch=9).samples[0][order])


def test_a_split_begins_anew_below_and_takes_nothing_from_above():
    """Two siblings with no noise between them differ from a chain by the steps that have no step before them."""
    steps, split = 6, 2
    still = Kernel("flow_sde", 1e-6)
    options = {"stochastic": {split}, "trained": (), "sibling_strength": None, "noise_scale": 1.0}
    plan = second_order(branch([still] * steps, {split}, 2, **options))
    tree = grown(plan, steps, noise=lambda shape, *address: torch.zeros(*shape))
    kernels = [edges.move.kernel for evaluation in tree.evaluations for edges in evaluation.edges]
    assert set(kernels) == {DPM2, still}

    def step(x, sigma, following):
        (moved,) = field((x,), sigma, [None])
        return x + (following - sigma) * moved, x - sigma * moved

    def added(before, own, last, sigma, following):
        odds = [float(torch.logit(1 - torch.tensor(s, dtype=torch.float64))) for s in (last, sigma, following)]
        ratio = (odds[2] - odds[1]) / (odds[1] - odds[0])
        return (sigma - following) / sigma * ratio / 2 * (own - before)

    x, before, levels = START, None, sigmas(steps)
    for i in range(steps):
        following, own = step(x, levels[i], levels[i + 1])
        if before is not None and levels[i + 1] > 0 and levels[i - 1] < 1:
            following = following + added(before, own, levels[i - 1], levels[i], levels[i + 1])
        if i == split:
            following, own = step(x, levels[i], levels[i + 1])[0], None
        x, before = following, own
    ends = tree.samples[0].reshape(9, 2, 1)
    assert len(tree.leaves) == 18
    torch.testing.assert_close(ends, x[:, None].expand(9, 2, 1), rtol=0, atol=1e-5)


def test_rows_of_one_call_may_have_different_pasts():
    """Of a node's two children one has a step before it that counts, the other, by noise, has none."""
    noisy = Kernel("flow_sde", 1e-6)

    def plan(role, step):
        return (Move(DPM2), Move(noisy)) if step == 1 else (Move(DPM2),)

    tree = grown(plan, 4, micro_batch=64, noise=lambda shape, *address: torch.zeros(*shape))
    ends = {}
    for leaf, sample in zip(tree.leaves, tree.samples[0], strict=True):
        ends[tree.nodes[leaf].path] = sample
    whole = chains(4, 2).samples[0]
    first, second = (torch.stack([ends[i, child] for i in range(9)]) for child in (0, 1))
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-6)
    assert (second - whole).abs().max() > 0.005


def test_estimates_are_kept_for_as_long_as_a_step_needs_them():
    second, state = SecondOrder(), (torch.ones(2, 3, dtype=torch.bfloat16),)

    def added(nodes, children, sigma, following, velocity):
        return second.correction(state, (velocity,), sigma, following, nodes, children)[0]

    assert torch.equal(added([0, 1], [2, 3], 0.9, 0.7, torch.ones(2, 3)), torch.zeros(2, 3))
    ratio = (math.log(0.5 / 0.5) - math.log(0.3 / 0.7)) / (math.log(0.3 / 0.7) - math.log(0.1 / 0.9))
    found = added([2, 3], [4, 5], 0.7, 0.5, torch.zeros(2, 3))
    torch.testing.assert_close(found, torch.full((2, 3), 0.2 / 0.7 * ratio / 2 * 0.9))  # estimates are 1 - 0.9, then 1
    second.forget([2])
    found = added([2, 3], [6, 7], 0.7, 0.5, torch.zeros(2, 3))
    assert not found[0].any()
    assert found[1].all()
