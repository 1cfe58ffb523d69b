"""A frozen base in shards: each process holds a part of its weights, and gathers a block when it computes it.

torch's `fully_shard` cuts the networks in place, so that a pipeline keeps the objects it knows. Adapters stay whole on every
process: their gradients, average, reference, checkpoints and export are those of a run without shards, and so is every
number: a gathered weight is the weight, to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training import quantise
from flowgrpo.training.lockstep import Lockstep
from flowgrpo.training.weights import Weights


def check(config: RunConfig) -> None:
    """Refuse what cannot be cut into shards.

    Raises:
        InputError: all weights are trained, or another library quantises the base.
    """
    if config.run.sharding == "none":
        return
    if config.model.lora is None:
        raise InputError(
            f"run.sharding: {config.run.sharding} cuts the frozen base of a LoRA, and without model.lora nothing is frozen; "
            "set model.lora, or run.sharding=none"
        )
    form = config.model.quantise
    if form is not None and form not in quantise.FORMS:
        raise InputError(
            f"run.sharding: the layers of model.quantise={form} cannot be cut, take {' or '.join(quantise.FORMS)}"
        )


def applies(form: str) -> bool:
    """Whether there are processes to share a base that is to lie in shards: one alone holds the whole."""
    return form != "none" and distributed.is_initialized() and distributed.get_world_size() > 1


def shard(weights: Weights, form: str, device: torch.device) -> None:
    """Cut the networks of a policy into shards, where `applies`, and let their processes take turns.

    Blocks go to the device one by one, so that no device holds all of a network that lies in host memory.

    Args:
        weights: adapters on frozen networks; gets the `lockstep`.
        form: of `run.sharding`: `fsdp2` over all processes; `hsdp` over those of a machine, each of which holds it all.
    """
    if not applies(form):
        return
    mesh, adapters = _mesh(form, device), set(weights.parameters)
    for network in weights.modules.values():
        for block in _blocks(network):
            fully_shard(block, mesh=mesh, ignored_params=adapters)
        fully_shard(network, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    weights.to(device)
    weights.lockstep = Lockstep(list(weights.modules.values()), weights.parameters)


def _mesh(form: str, device: torch.device, environment: Mapping[str, str] = os.environ) -> DeviceMesh:
    processes = distributed.get_world_size()
    if form == "fsdp2":
        return init_device_mesh(device.type, (processes,))
    of_machine = int(environment.get("LOCAL_WORLD_SIZE", processes))
    return init_device_mesh(device.type, (processes // of_machine, of_machine), mesh_dim_names=("replicate", "shard"))


def _blocks(network: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The repeated blocks of a network, as its class names them; else the members of its lists. None lies in another."""
    names = next(
        (found for key in ("_repeated_blocks", "_no_split_modules") if (found := getattr(network, key, None))), ()
    )
    named = [module for module in network.modules() if type(module).__name__ in names]
    listed = (m for each in network.modules() if isinstance(each, torch.nn.ModuleList) for m in each)
    seen: set[torch.nn.Module] = set()
    for block in named or listed:
        if block not in seen and any(True for _ in block.parameters()):
            seen.update(block.modules())
            yield block
