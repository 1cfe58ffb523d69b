"""Compiled blocks: one graph with and without a gradient, in place, and off again."""

import shutil
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
import torch._inductor.cpu_vec_isa
from replayed import ROWS, policy_of, trained
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowgrpo.flow import setup
from flowgrpo.flow.config import Model
from flowgrpo.flow.pipeline.networks.compiled_blocks import CompiledBlocks
from flowgrpo.training.weights import offload_activations


class Block(nn.Module):
    """A modulated norm before a product, whose graph without a gradient rounds elsewhere in bfloat16."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x):
        shift, scale = self.linear(functional.silu(x.mean(1))).chunk(2, -1)
        x = functional.layer_norm(x, (16,)) * (1 + scale[:, None]) + shift[:, None]
        return functional.linear(x, self.linear.weight[:16])


class Blocks(nn.Module):
    """A network of equal blocks; notes how many of their inputs are there when the last one ends."""

    gradient_checkpointing = False

    def __init__(self, count=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.scale = nn.Parameter(torch.ones(16))
        self.there = 0

    def forward(self, x):
        x, inputs = x * self.scale, []
        for block in self.blocks:
            inputs.append(weakref.ref(x))
            checkpoints = torch.is_grad_enabled() and self.gradient_checkpointing
            x = checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)
        self.there = sum(each() is not None for each in inputs)
        return (x,)


def noted(graphs):
    """A compiler without a compiler, which notes what it is given."""
    return lambda graph, inputs: graphs.append(graph) or graph


def without_gradient(network, x):
    with torch.no_grad():
        return network(x)[0]


@pytest.mark.skipif(shutil.which("g++") is None, reason="it compiles for the CPU")
def test_calls_with_and_without_a_gradient_are_equal_to_the_bit(monkeypatch):
    for key, quick in (("cpp_cache_precompile_headers", False), ("compile_threads", 1)):
        monkeypatch.setattr(torch._inductor.config, key, quick)
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "valid_vec_isa_list", list)  # it would compile for each to ask
    network, x = Blocks().bfloat16(), torch.randn(3, 32, 16).bfloat16()
    eager = network(x)[0]
    CompiledBlocks([network])
    rollout, (update,) = without_gradient(network, x), network(x)
    assert not rollout.requires_grad
    assert torch.equal(rollout, update)
    assert not torch.equal(update, eager)  # it is compiled
    torch.testing.assert_close(update, eager, rtol=0.1, atol=0.1)


def test_a_shape_has_its_graph_also_after_others_came():
    """PyTorch would compile a graph for all shapes when a second one comes, and take it for the first one, too."""
    ran = []

    def named(graph, inputs):
        number = len(ran)
        ran.append([])
        return lambda *given: ran[number].append(len(given[0])) or graph(*given)

    network = Blocks(1)
    CompiledBlocks([network], named)
    for rows in (4, 3, 2, 4):
        without_gradient(network, torch.randn(rows, 8, 16))
    network(torch.randn(4, 8, 16))
    assert [len(calls) for calls in ran] == [3, 1, 1]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_call_without_a_gradient_keeps_nothing_for_a_backward_pass(checkpoints):
    network, x = Blocks(4), torch.randn(3, 8, 16)
    network.gradient_checkpointing = checkpoints
    CompiledBlocks([network], noted([]))
    network(x)
    assert network.there == 4
    without_gradient(network, x)
    assert network.there <= 1  # the last one may be in use


def test_switched_off_nothing_is_compiled():
    network, x, graphs = Blocks(), torch.randn(3, 8, 16), []
    blocks = CompiledBlocks([network], noted(graphs))
    blocks.switch(False)
    without_gradient(network, x)
    network(x)
    assert not graphs
    assert all(block._compiled_call_impl is None for block in network.blocks)
    blocks.switch(True)
    without_gradient(network, x)
    found = len(graphs)
    network(x)[0].sum().backward()
    assert len(graphs) == found > 0  # one graph for both


def test_nothing_that_is_dropped_is_offloaded(monkeypatch):
    """The switches are put on a network so that offloading sees updates only."""
    monkeypatch.setattr(setup, "CompiledBlocks", partial(CompiledBlocks, backend=noted([])))
    begun = []
    monkeypatch.setattr(offload_activations.OffloadedTensors, "__enter__", lambda self: begun.append(1) or self)
    monkeypatch.setattr(offload_activations.OffloadedTensors, "__exit__", lambda self, *error: None)
    network, x = Blocks(), torch.randn(3, 8, 16)
    policy = SimpleNamespace(modules={"network": network}, pipe=None)
    setup.set_switches(Model(path="none", compile=True, offload_activations=True), policy, torch.device("cpu"))
    without_gradient(network, x)
    assert not begun
    network(x)
    assert begun


def test_compiled_blocks_compute_the_same_in_place():
    policies = [policy_of("flux"), policy_of("flux")]
    for each in policies:
        blocks = each.pipe.transformer.single_transformer_blocks
        each.pipe.transformer.single_transformer_blocks = blocks[:1]  # one is enough to compile
        each.pipe.transformer.transformer_blocks = torch.nn.ModuleList()
    plain, policy = trained(policies[0]), policies[1]
    transformer, graphs = policy.pipe.transformer, []
    policy.start(ROWS)  # what it tries first need not be compiled
    block = transformer.single_transformer_blocks[0]
    CompiledBlocks(policy.modules.values(), noted(graphs))
    numbers, drift, gradients = trained(policy)
    assert graphs
    assert policy.pipe.transformer is transformer is policy.modules["transformer"]
    assert transformer.single_transformer_blocks[0] is block
    for a, b in zip((*numbers, *gradients), (*plain[0], *plain[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert drift == 0.0


def test_a_class_that_names_no_blocks_is_compiled_too():
    plain, policy, graphs = policy_of("sd3"), policy_of("sd3"), []
    for each in (plain, policy):
        del each.pipe.transformer.transformer_blocks[0]  # the other is enough to compile
    states = [p.start(ROWS[:1]) for p in (plain, policy)]
    blocks = list(policy.pipe.transformer.transformer_blocks)
    CompiledBlocks(policy.modules.values(), noted(graphs))
    assert not policy.pipe.transformer._repeated_blocks
    with torch.no_grad():
        velocities = [p.velocity(x, p.sigmas[0], ROWS[:1])[0] for p, x in zip((plain, policy), states, strict=True)]
    torch.testing.assert_close(*velocities, rtol=1e-5, atol=1e-5)
    assert graphs
    assert list(policy.pipe.transformer.transformer_blocks) == blocks
