"""What `test_lockstep` and `test_sharding` run in two processes: networks in shards, called in unequal number and order."""

import tiny
import torch
from torch.distributed.fsdp import fully_shard

from flowgrpo.training import sharding
from flowgrpo.training.lockstep import Lockstep, stands_in
from flowgrpo.training.weights import Weights, lora_config


class Adapter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.on = True

    def forward(self, x):
        return x * self.scale if self.on else x


def whole(seed):
    torch.manual_seed(seed)
    network = torch.nn.Sequential(*(torch.nn.Linear(4, 4).requires_grad_(False) for _ in range(4)))
    network.insert(3, Adapter())
    return network


def networks(counted, met=None):
    """Two networks with an adapter each on a base in shards, whose calls are counted but for those thrown away."""
    made = []
    for seed in (1, 2):
        network = whole(seed)
        own = set(network[3].parameters())
        for block in (*network[:3], network[4]):
            fully_shard(block, ignored_params=own)
        fully_shard(network, ignored_params=own, reshard_after_forward=True)
        network.register_forward_pre_hook(lambda *_: None if stands_in() else counted.append(1))
        made.append(network)
    lockstep = Lockstep(made)
    with torch.no_grad(), lockstep.meeting():
        for network in made:
            network(torch.ones(1, 4) if met is None else met)
    lockstep.join()
    counted.clear()
    return made, lockstep


def rows(rank):
    return torch.full((1, 4), 1.0 + rank)


def unequal_calls(rank):
    """Each process calls the networks in an order and a number of its own."""
    counted = []
    (first, second), lockstep = networks(counted)
    order = [first] * 3 if rank == 0 else [second, first]
    with torch.no_grad():
        found = [network(rows(rank)) for network in order]
        lockstep.join()
        again = [network(rows(rank)) for network in ([second] * 2 if rank else [])]
    lockstep.join()
    return found, again, len(counted)


def unequal_updates(rank):
    """One process has two losses, one of them of two calls; the other has one, and then none."""
    (first, second), lockstep = networks([])
    if rank == 0:
        lockstep.backward((first(rows(0)) + first(2 * rows(0))).sum())
        lockstep.backward(second(rows(0)).square().sum())
        lockstep.join()
    else:
        with torch.no_grad():
            second(rows(1))  # a reference, say
        lockstep.backward(first(rows(1)).sum())
        lockstep.join()
    return [network[3].scale.grad for network in (first, second)]


def unequal_references(rank):
    """One process computes a reference, its adapters off, when the other has a loss already."""
    (first, second), lockstep = networks([])
    if rank == 0:
        for network in (first, second):
            network[3].on = False
        with torch.no_grad():
            second(rows(0))
        for network in (first, second):
            network[3].on = True
        lockstep.backward(second(rows(0)).sum())
    else:
        lockstep.backward(first(rows(1)).sum())
    lockstep.join()
    return [network[3].scale.grad for network in (first, second)]


def broken_stand_ins(rank):
    """The call that is made to stand in has results that are not numbers."""
    (first, _), lockstep = networks([], met=torch.full((1, 4), torch.inf))
    for _ in range(1 + rank):
        lockstep.backward(first(rows(rank)).sum())
    lockstep.join()
    return first[3].scale.grad


def failing(rank):
    (first, _), _ = networks([])
    if rank == 1:
        raise ValueError("no more")
    with torch.no_grad():
        first(rows(0))


def held(rank):
    """Of a transformer in shards: numbers of its base on this process, and of all; and those of its adapters alike."""
    transformer = tiny.sd3().transformer.requires_grad_(False)
    weights = Weights({"transformer": transformer}, lora_config(2, 4, "auto", {"transformer": transformer}))
    sharding.shard(weights, "fsdp2", torch.device("cpu"))
    frozen = [p for p in transformer.parameters() if not p.requires_grad]
    trained = [p for p in transformer.parameters() if p.requires_grad]
    blocks = [name for name, module in transformer.named_modules() if hasattr(module, "unshard")]
    return {
        "here": sum(p.to_local().numel() for p in frozen),
        "all": sum(p.numel() for p in frozen),
        "adapters whole": all(type(p) is torch.nn.Parameter for p in trained),
        "blocks": blocks,
    }


def of_machines(rank):
    """The mesh of two machines of one process each."""
    mesh = sharding._mesh("hsdp", torch.device("cpu"), {"LOCAL_WORLD_SIZE": "1"})
    return mesh.mesh_dim_names, tuple(mesh.shape)
