"""The noise of the children of one state."""

import math

import pytest
import torch
from grown import DANCE, SIGMAS, Field, address_noise, batch, grown

from samplers.trees import Move, grow


def split_step_split(**siblings):
    """Two children of each root, with these options of their noise; one plain child of each; of each of those two again."""
    split, step = Move(DANCE, count=2, trained=True, **siblings), Move(DANCE, trained=True)
    return lambda role, at: {0: (split,), 1: (step,), 2: (split,)}.get(at, ())


def dance_noises(tree, step):
    """Of every edge of a step: what was added to the mean in units of the kernel's std, the log-prob, and the parent."""
    std = 0.3 * math.sqrt(SIGMAS[step] - SIGMAS[step + 1])
    edges = [edges for e in tree.evaluations if e.sigma == SIGMAS[step] for edges in e.trained]
    parents = torch.tensor([tree.nodes[node].parent for e in edges for node in e.nodes])
    noises = torch.cat([(e.next_state[0] - e.mean[0]) / std for e in edges])
    return noises, torch.cat([e.log_prob for e in edges]), parents


@pytest.mark.parametrize("strength", [None, 1.0, 4.0])
def test_siblings_share_noise_of_their_parent_and_of_nothing_else(strength):
    size = 50_000
    tree = grown(split_step_split(sibling_strength=strength), groups=2, size=2, shape=(size,), keep_means=True)
    noises, _, parents = zip(*(dance_noises(tree, step) for step in range(3)), strict=True)
    drawn, parent = torch.cat(noises), torch.cat(parents)  # (4 roots: 8 edges, 8 and 16; size), (32,)
    covariance = 0 if strength is None else 1 / (1 + strength**2)
    expected = torch.where(parent == parent[:, None], covariance, 0.0).fill_diagonal_(1)
    assert (parent == parent[:, None]).sum() == 32 + 8 + 16
    assert drawn.mean(1).abs().max() < 5 / math.sqrt(size)
    assert (drawn @ drawn.T / size - expected).abs().max() < 5 * math.sqrt(2 / size)


def test_siblings_share_noise_tensor_by_tensor():
    roots, (video,) = batch(groups=1, size=1, shape=(100_000,))
    plan, start = split_step_split(sibling_strength=1.0), (video, video)
    tree = grow(plan, SIGMAS, roots, start, Field(), address_noise, 4, keep_means=True)
    (edges,) = tree.evaluations[0].trained
    std = 0.3 * math.sqrt(SIGMAS[0] - SIGMAS[1])
    first, second = ((x - mean) / std for x, mean in zip(edges.next_state, edges.mean, strict=True))
    torch.testing.assert_close(first @ second.T / 100_000, torch.zeros(2, 2), rtol=0, atol=0.016)
    torch.testing.assert_close(second @ second.T / 100_000, (1 + torch.eye(2)) / 2, rtol=0, atol=0.023)


@pytest.mark.parametrize("strength", [None, 4.0])
def test_the_noise_scale_multiplies_the_noise_and_the_log_prob_knows_nothing_of_it(strength):
    plain, hot = (
        grown(split_step_split(sibling_strength=strength, noise_scale=scale), shape=(50,), keep_means=True)
        for scale in (1.0, 4.0)
    )
    cold_noise, _, _ = dance_noises(plain, 0)
    hot_noise, recorded, _ = dance_noises(hot, 0)
    torch.testing.assert_close(hot_noise, 4 * cold_noise, rtol=1e-4, atol=1e-4)
    std = 0.3 * math.sqrt(SIGMAS[0] - SIGMAS[1])
    expected = torch.distributions.Normal(0, std).log_prob(4 * cold_noise * std).mean(1)
    torch.testing.assert_close(recorded, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dance_noises(hot, 1)[0], dance_noises(plain, 1)[0], rtol=1e-4, atol=1e-4)
