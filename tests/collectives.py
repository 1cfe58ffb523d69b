"""Count the bytes that `test_collective_traffic` sends in two processes, or in one that pretends to be of many."""

import os
from collections import defaultdict
from functools import partial

import tiny
import torch
from in_shards import cut_in_shards, summed, take_step
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowgrpo.training.weights import sharding
from flowgrpo.training.weights.trained_weights import Weights, lora_config

SENT = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "sum"}


class Collectives(TorchDispatchMode):
    """Count the bytes that a process sends in each collective, going round a ring; sums are over replicas, if any."""

    def __init__(self, processes, replicas=1):
        super().__init__()
        self.processes, self.sent = processes, defaultdict(int)
        self.summing = replicas if replicas > 1 else processes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            name = function._overloadpacket.__name__
            sizes = [x.numel() * x.element_size() for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            whole = max(sizes, default=0)
            if whole > 8:  # wishes of lock-step, and whether a weight is reached
                ring, among = (2, self.summing) if SENT[name] == "sum" else (1, self.processes)
                self.sent[SENT[name]] += ring * whole * (among - 1) // among
        return out


def in_phases(modules, weights, *, half):
    """Return the bytes sent in a call without gradient, in one with its backward pass, and in an optimizer step."""
    network = modules["transformer"]
    given, found = tiny.sd3_inputs(network), []
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=half)

    def call():
        with autocast:
            return network(**given)[0].float().square().sum()

    optimizer = torch.optim.AdamW(weights.parameters)
    with torch.no_grad(), weights.lockstep.meeting():
        call()
    weights.lockstep.join()
    for work in (
        torch.no_grad()(call),
        lambda: weights.lockstep.backward(call()),
        lambda: take_step(weights, optimizer, max_grad_norm=1.0, reduce=partial(summed, weights)),
    ):
        counter = Collectives(2)
        with counter:
            work()
        weights.lockstep.join()
        found.append(dict(counter.sent))
    return found


def shapes_of(network):
    return {name: tuple(p.shape) for name, p in network.named_parameters()}


def of_two(rank, *, full, half=False):
    """Return the bytes sent, the shapes of the network, and how many numbers are trained."""
    torch.manual_seed(0)
    network = tiny.sd3().transformer.requires_grad_(False)
    modules, shapes = {"transformer": network}, shapes_of(network)
    weights = cut_in_shards(
        modules,
        lambda: Weights(modules, None if full else lora_config(2, 4, "auto", modules)),
        full=full,
        gather=torch.bfloat16 if half else None,
    )
    learn = sum(p.numel() for p in weights.parameters)
    return in_phases(modules, weights, half=half), shapes, learn


_TRAINED = ({"full": False}, {"full": True}, {"full": True, "half": True})
lora, full, full_in_half = (partial(of_two, **options) for options in _TRAINED)


def of_many(cases, file):
    """Write the bytes sent by the first of many processes, whose messages reach nobody, and the network's shapes.

    Cases are (all weights are trained, processes, processes per machine). Machines share the network within themselves.
    """
    torch.save([_of_many(*case) for case in cases], file)
    os._exit(0)


def _of_many(full, processes, of_node):
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    network = tiny.sd3().transformer.requires_grad_(False)
    modules, shapes = {"transformer": network}, shapes_of(network)
    form = "fsdp2" if of_node == processes else "hsdp"
    mesh = sharding._mesh(form, torch.device("cpu"), {"LOCAL_WORLD_SIZE": str(of_node)})
    if full:
        sharding._cut_learning(network, mesh, None)
    else:
        sharding._cut_frozen(Weights(modules, lora_config(2, 4, "auto", modules)), mesh)
    found = []
    for learns in (False, True):
        counter = Collectives(of_node, replicas=processes // of_node)
        with counter, torch.set_grad_enabled(learns):
            out = network(**tiny.sd3_inputs(network))[0]
            if learns:
                out.sum().backward()
        found.append(dict(counter.sent))
    distributed.destroy_process_group()
    return found, shapes
