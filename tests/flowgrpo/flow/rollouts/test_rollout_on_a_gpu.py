"""A rollout and its update on a pretended GPU, and on a real one: the host's numbers, and no step that keeps it waiting."""

import threading

import pytest
import torch
from pretended_gpu import There, moved, numbers, pretended
from replayed import ROWS, policy_of, trained
from torch.utils._pytree import tree_leaves

from samplers import noise
from samplers.growth import grow
from samplers.kernels import Kernel
from samplers.plans import branch
from samplers.trees import Root

SDE = Kernel("flow_sde", 0.7)


def there(name):
    """A tiny policy on the pretended GPU."""
    policy = policy_of(name)
    for component in policy.pipe.components.values():
        if isinstance(component, torch.nn.Module):
            moved(component)
    return policy


def edge_noise(shape, *address):
    return noise.noise(shape, "test", *address)


def are_those_of_the_host(name, own, gradients):
    expected, _, expected_gradients = trained(policy_of(name))
    for x, y in zip(own, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    whole, expected_whole = (torch.cat([g.flatten() for g in each]) for each in (gradients, expected_gradients))
    assert (whole - expected_whole).norm() < 1e-4 * expected_whole.norm()


@pytest.mark.parametrize("name", [pytest.param("sd3_guided", marks=pytest.mark.zoo), "flux"])
def test_a_rollout_and_its_replay_are_those_of_the_host(name):
    with pretended():
        own, drift, gradients = trained(there(name))
        own, gradients = numbers((own, gradients))
    assert drift == 0
    are_those_of_the_host(name, own, gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sd3_guided", "flux"])
def test_a_real_gpu_has_the_numbers_of_the_host(name, exact_convolutions):
    own, drift, gradients = trained(policy_of(name), torch.device("cuda"))
    assert all(x.is_cuda for x in own)
    assert drift == 0
    are_those_of_the_host(name, [x.cpu() for x in own], [g.cpu() for g in gradients])


def split(steps, factor, strength):
    """Chains of four steps, three of them stochastic and trained, that split at some."""
    three = range(3)
    return branch([SDE] * 4, steps, factor, stochastic=three, trained=three, sibling_strength=strength, noise_scale=1.0)


@pytest.mark.parametrize("plan", [pytest.param(split((), 1, None), marks=pytest.mark.zoo), split((1,), 2, 1.0)])
def test_no_step_of_a_rollout_waits_for_the_gpu(plan):
    with pretended() as waits:
        policy = there("sd3")
        start = policy.start(ROWS)
        assert waits  # the host draws these, and sends them
        policy.velocity(start, policy.sigmas[1], ROWS)
        waits.clear()
        grow_on(policy, plan, start)
        assert waits == []


@torch.no_grad()
def grow_on(policy, plan, start):
    roots = [Root(i, 0, row) for i, row in enumerate(ROWS)]
    grow(plan, policy.sigmas, roots, start, policy.velocity, edge_noise, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [split((), 1, None), split((1,), 2, 1.0)])
@pytest.mark.parametrize("name", ["sd3", "sd3_guided"])
def test_no_step_of_a_rollout_waits_for_a_real_gpu(plan, name):
    policy = policy_of(name)
    policy.pipe.to("cuda")
    start = policy.start(ROWS)
    policy.velocity(start, policy.sigmas[1], ROWS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grow_on(policy, plan, start)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("steps", "strength"), [((), None), ((0, 1), 2.0)])
def test_noise_is_drawn_while_the_model_computes_elsewhere(steps, strength):
    """And is the same as on the host, where none is drawn before the model has computed."""
    drawn, computed = [], []
    begun = threading.Semaphore(0)

    def counting(shape, *address):
        drawn.append(address)
        begun.release()
        return edge_noise(shape, *address)

    def here(state, sigma, rows):
        computed.append(len(drawn))
        return tuple(torch.sin(x) for x in state)

    def elsewhere(state, sigma, rows):
        step = len(computed) - 4
        edges = len(rows) * (3 if step in steps else 1)
        assert all(begun.acquire(timeout=60) for _ in range(edges if step < 3 else 0))
        return here(state, sigma, rows)

    def grown(start, evaluate):
        roots = [Root(i, 0, None) for i in range(2)]
        tree = grow(split(steps, 3, strength), [1.0, 0.9, 0.6, 0.3, 0.0], roots, (start,), evaluate, counting, 64)
        return tree.samples, [edges.log_prob for e in tree.evaluations for edges in e.trained]

    start = noise.noise((2, 5), "start")
    expected = grown(start, here)
    assert computed[0] == 0
    while begun.acquire(blocking=False):
        pass
    asked = list(drawn)
    drawn.clear()
    with pretended():
        own = numbers(grown(There(start), elsewhere))
    assert sorted(drawn) == sorted(asked)  # each once
    assert all(map(torch.equal, tree_leaves(own), tree_leaves(expected)))
