"""Calls of a network in one process, and in two that share it along its sequence, for `test_context_parallel`."""

import torch
from torch import distributed
from zoo import SPECIMENS

from flowgrpo.flow.model import context_parallel
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.training.weights.trained_weights import Weights, lora_config

CPU = torch.device("cpu")


def velocity_and_gradient(_, name, call, *, degree=2, checkpointing=False):
    """Return velocities, those of a replay, and summed gradients of a zoo pipeline with adapters on all layers."""
    specimen = SPECIMENS[name]
    policy = DiffusersPolicy(specimen.build(), {**specimen.call, **call})
    weights = Weights(policy.modules, lora_config(2, 4, "all-linear", policy.modules))
    for seed, p in enumerate(weights.parameters):
        torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(seed))
    for module in policy.modules.values() if checkpointing else ():
        module.enable_gradient_checkpointing()
    if degree > 1:
        sharing()
        context_parallel.share_calls(policy.modules, degree, CPU)
    rows = specimen.rows[::2]  # of unequal prompts
    state, sigma = policy.start(rows), policy.sigmas[1]
    with torch.no_grad():
        before = policy.velocity(state, sigma, rows)
    velocity = policy.velocity(state, sigma, rows)
    generator = torch.Generator().manual_seed(0)
    sum((v * torch.randn(v.shape, generator=generator)).sum() for v in velocity).backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in weights.named.items()}
    if degree > 1:
        for gradient in gradients.values():
            distributed.all_reduce(gradient)
    return [v.detach() for v in velocity], before, gradients


def sharing():
    """Let diffusers take this machine for one with accelerators."""
    torch.accelerator.device_count = lambda: 1
