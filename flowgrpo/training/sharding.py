"""A frozen base in shards: each process holds a part of its weights, and gathers a block when it computes it.

torch's `fully_shard` cuts the networks in place, so that a pipeline keeps the objects it knows. Adapters stay whole on every
process: their gradients, average, reference, checkpoints and export are those of a run without shards, and so is every
number: a gathered weight is the weight, to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

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
        InputError: all weights are trained, another library quantises the base, or activations are offloaded with it.
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
    if config.model.offload_activations and not config.model.gradient_checkpointing:
        raise InputError(
            "run.sharding: model.offload_activations would take each gathered weight for an activation; set "
            "model.gradient_checkpointing=true too, or model.offload_activations=false"
        )


def among(form: str, environment: Mapping[str, str] = os.environ) -> int:
    """How many processes share a base that is to lie in shards, of those that run; 1 where each holds the whole."""
    if form == "none" or not distributed.is_initialized():
        return 1
    processes = distributed.get_world_size()
    return int(environment.get("LOCAL_WORLD_SIZE", processes)) if form == "hsdp" else processes


def applies(form: str) -> bool:
    """Whether there are processes to share a base that is to lie in shards."""
    return among(form) > 1


def shard(weights: Weights, form: str, device: torch.device) -> None:
    """Cut the networks of a policy into shards, where `applies`, and let their processes take turns.

    Blocks go to the device one by one, so that no device holds all of a network that lies in host memory.

    Args:
        weights: adapters on frozen networks; gets the `lockstep`.
        form: of `run.sharding`: `fsdp2` over all processes; `hsdp` over those of a machine, each of which holds it all.

    Raises:
        InputError: most of a network lies in no block, machines have unequal numbers of processes, or torch cannot cut a
            quantised base.
    """
    if not applies(form):
        return
    mesh, adapters = _mesh(form, device), set(weights.parameters)
    try:
        for network in weights.modules.values():
            for block in blocks(network):
                fully_shard(block, mesh=mesh, ignored_params=adapters)
            fully_shard(network, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    except RuntimeError as error:
        if "floating point dtype can require gradients" not in str(error):
            raise
        raise InputError(
            f"run.sharding: torch {torch.__version__} cannot cut a base of whole numbers, as model.quantise makes it; "
            "take a later torch, or model.quantise=null"
        ) from error
    weights.to(device)
    weights.lockstep = Lockstep(list(weights.modules.values()))


def _mesh(form: str, device: torch.device, environment: Mapping[str, str] = os.environ) -> DeviceMesh:
    processes, sharing = distributed.get_world_size(), among(form, environment)
    if processes % sharing:
        raise InputError(
            f"run.sharding: hsdp needs as many processes on every machine, and {processes} are not {sharing} on each"
        )
    if form == "fsdp2":
        return init_device_mesh(device.type, (processes,))
    return init_device_mesh(device.type, (processes // sharing, sharing), mesh_dim_names=("replicate", "shard"))


def blocks(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks of a network, as its class names them; else the members of its lists. None lies in another.

    Raises:
        InputError: they are less than half of it, so that most would be gathered at once.
    """
    names = {*(getattr(network, "_repeated_blocks", None) or ()), *(getattr(network, "_no_split_modules", None) or ())}
    named = [module for module in network.modules() if type(module).__name__ in names]
    listed = (m for each in network.modules() if isinstance(each, torch.nn.ModuleList) for m in each)
    found, inside = [], set()
    for block in named or listed:
        if block not in inside and any(True for _ in block.parameters()):
            inside.update(block.modules())
            found.append(block)
    numbers = sum(p.numel() for block in found for p in block.parameters())
    if 2 * numbers < sum(p.numel() for p in network.parameters()):
        raise InputError(
            f"run.sharding: most of {type(network).__name__} lies in none of its repeated blocks; set run.sharding=none"
        )
    return found
