"""Networks in shards in two processes, called in unequal number and order, for `test_fsdp_lockstep` and `test_sharding`."""

from contextlib import nullcontext
from functools import partial

import tiny
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from flowgrpo.schema.sections import Ema
from flowgrpo.training.distributed.dtensors import gather_whole, local
from flowgrpo.training.distributed.fsdp_lockstep import Lockstep, stands_in
from flowgrpo.training.weights import sharding
from flowgrpo.training.weights.optimizer_step import UpdateStats, optimizer_step
from flowgrpo.training.weights.trained_weights import Weights, lora_config


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
    """Make two networks with an adapter each on a sharded base, and count the calls that are not thrown away."""
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
    """Call the networks in an order and a number of each process's own."""
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
    """Give one process two losses, one of them of two calls, and the other one loss and then none."""
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
    """Compute a reference, its adapters off, while the other process has a loss already."""
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
    """Let the call that is made to stand in have results that are not numbers."""
    (first, _), lockstep = networks([], met=torch.full((1, 4), torch.inf))
    for _ in range(1 + rank):
        lockstep.backward(first(rows(rank)).sum())
    lockstep.join()
    return first[3].scale.grad


def learning(seeds=(1, 2)):
    """Make two small networks of blocks, of which all weights are to be trained."""
    made = {}
    for seed in seeds:
        torch.manual_seed(seed)
        blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        made[f"net{seed}"] = Chain(blocks)
    return made


class Chain(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.scale = blocks, torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


def cut_in_shards(modules, make, *, form="fsdp2", full=True, gather=None):
    return sharding.shard(modules, make, form=form, device=torch.device("cpu"), full=full, gather=gather)


def take_step(weights, optimizer, *, max_grad_norm, reduce):
    stats, scaler = UpdateStats(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer_step(weights, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=max_grad_norm, reduce=reduce)
    return stats


def summed(weights, x):
    weights.lockstep.join()
    distributed.all_reduce(x)
    return x


def of_all(modules, *, form="fsdp2", half=False, **options):
    """Shard networks trained whole, with a reference elsewhere."""
    weights = cut_in_shards(modules, lambda: Weights(modules, None, reference="fixed", **options), form=form)
    with torch.no_grad(), weights.lockstep.meeting(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        for module in modules.values():
            module(torch.ones(1, 4))
    weights.lockstep.join()
    with torch.no_grad():
        for p in weights.parameters:
            p.mul_(0.5)
    return weights


def unequal_updates_of_all(rank):
    """Give one process two losses, and the other a reference and one loss; return the summed gradients."""
    modules = learning()
    weights = of_all(modules)
    first, second = modules.values()
    reference = None
    if rank == 0:
        weights.lockstep.backward((first(rows(0)) + first(2 * rows(0))).sum())
        weights.lockstep.backward(second(rows(0)).square().sum())
    else:
        with torch.no_grad(), weights.reference():
            reference = second(rows(1))
        weights.lockstep.backward(first(rows(1)).sum())
    weights.lockstep.join()
    return reference, {name: gather_whole(p.grad) for name, p in weights.named.items()}


def references_of_two(rank):
    """Compute a reference of another network on each process at once."""
    modules = learning()
    weights = of_all(modules)
    with torch.no_grad(), weights.reference():
        found = modules[f"net{2 - rank}"](rows(rank))
    weights.lockstep.join()
    return found


def reference_within_autocast(rank):
    """Stand in for a call of the reference under the autocast of the own call."""
    modules = learning()
    weights = of_all(modules, half=True)
    half = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.no_grad(), nullcontext() if rank == 0 else weights.reference(), half:
        found = modules["net1"](rows(0))
    weights.lockstep.join()
    return found


class TwoExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.experts[int(x.sum() > 4)](x)


def experts():
    torch.manual_seed(0)
    return {"net": Chain(torch.nn.ModuleList(TwoExperts() for _ in range(2)))}


def experts_apart(rank):
    """Return the gradients of a network of which each process reaches other experts."""
    modules = experts()
    weights = of_all(modules)
    weights.lockstep.backward(modules["net"](rows(rank)).sum())
    weights.lockstep.join()
    return {name: gather_whole(p.grad) for name, p in weights.named.items()}


def steps_of_all(rank):
    """Take two optimizer steps with an average."""
    modules = learning()
    weights = of_all(modules, ema=Ema(decay=0.5, every=1))
    optimizer = torch.optim.AdamW(weights.parameters, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for module in modules.values():
            weights.lockstep.backward(module(rows(rank) + step).sum())
        stats = take_step(weights, optimizer, max_grad_norm=0.1, reduce=partial(summed, weights))
    with torch.no_grad(), weights.averaged():
        averaged = modules["net1"](rows(0))
    weights.lockstep.join()
    kept = {name: gather_whole(tensor).clone() for name, tensor in weights.tensors().items()}
    return {
        "norm": stats.grad_norm,
        "averaged": averaged,
        "kept": kept,
        "here": sum(local(p).numel() for p in weights.parameters),
    }


def in_half(rank):
    """Return velocities and gradients under autocast of a transformer that is whole, and of one in shards."""
    torch.manual_seed(0)
    whole, cut = tiny.sd3().transformer.float(), tiny.sd3().transformer.float()
    cut.load_state_dict(whole.state_dict())
    modules = {"transformer": cut}
    weights = cut_in_shards(modules, lambda: Weights(modules, None), gather=torch.bfloat16)
    given = tiny.sd3_inputs(whole)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), weights.lockstep.meeting():
        found = [network(**given)[0] for network in (whole, cut)]
    if rank == 0:  # the other stands in, outside of autocast
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cut(**given)[0].float().square().sum()
        weights.lockstep.backward(loss)
    weights.lockstep.join()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole(**given)[0].float().square().sum().backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    return found, gradients, {name: gather_whole(p.grad) for name, p in cut.named_parameters() if p.grad is not None}


def failing(rank):
    (first, _), _ = networks([])
    if rank == 1:
        raise ValueError("no more")
    with torch.no_grad():
        first(rows(0))


def held(rank):
    """Count the base's numbers of a sharded transformer, on this process and in all, and the same of its adapters."""
    transformer = tiny.sd3().transformer.requires_grad_(False)
    modules = {"transformer": transformer}
    cut_in_shards(modules, lambda: Weights(modules, lora_config(2, 4, "auto", modules)), full=False)
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
    """Return the mesh of two machines of one process each."""
    mesh = sharding._mesh("hsdp", torch.device("cpu"), {"LOCAL_WORLD_SIZE": "1"})
    return mesh.mesh_dim_names, tuple(mesh.shape)
