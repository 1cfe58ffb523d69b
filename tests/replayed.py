"""A rollout of a tiny pipeline with LoRA, and its replay."""

import tiny
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.training.weights.trained_weights import Weights, lora_config
from samplers import noise
from samplers.growth import grow
from samplers.kernels import Kernel, log_prob
from samplers.plans import chain
from samplers.trees import Root, edge_transition

ROWS = [Row(prompt, 100 + i) for i, prompt in enumerate(["a red circle", "two blue square", "a green circle"])]


def policy_of(name):
    return DiffusersPolicy(tiny.PIPELINES[name](), tiny.CALLS[name])


def adapted(policy, alpha=4, size=0.05):
    """Add adapters of rank 2 that change what a policy computes."""
    torch.manual_seed(1)
    weights = Weights(policy.modules, lora_config(2, alpha, "auto", policy.modules))
    with torch.no_grad():
        for p in weights.parameters:
            p.add_(size * torch.randn_like(p))
    return weights


def drift(policy, tree):
    """Return the largest |log ratio| of a replay, whose gradients stay on the weights."""
    largest = 0.0
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            velocity = policy.velocity(evaluation.state, evaluation.sigma, evaluation.rows)
            mean, std = edge_transition(edges, evaluation.sigma, evaluation.state, velocity, tree.sigma_cap)
            replayed = log_prob(edges.next_state, mean, std, edges.move.kernel.log_prob)
            replayed.sum().backward()
            largest = max(largest, (replayed - edges.log_prob).abs().max().item())
    return largest


def rollout(policy):
    """Return the tree of three chains, trained in three of their four steps."""
    with torch.no_grad():
        return grow(
            chain([Kernel("flow_sde", 0.7)] * 4, range(3), range(3)),
            policy.sigmas,
            [Root(i, 0, row) for i, row in enumerate(ROWS)],
            policy.start(ROWS),
            policy.velocity,
            lambda shape, *address: noise.noise(shape, "test", *address),
            3,
        )


def trained(policy, device=None):
    """Return samples, log-probs and pictures of a rollout with LoRA, its drift, and the gradients of its replay.

    The adapters' numbers are those of the host on every device.
    """
    weights = adapted(policy)
    if device is not None:
        policy.pipe.to(device)
        weights.to(device)
    tree = rollout(policy)
    moved = drift(policy, tree)
    log_probs = [edges.log_prob for evaluation in tree.evaluations for edges in evaluation.trained]
    numbers = (tree.samples[0], torch.cat(log_probs), policy.decode(tree.samples, ROWS))
    return numbers, moved, [p.grad for p in weights.parameters]
