"""FSDP: each process holds a shard of the networks' weights, and gathers the weights of a block to compute it.

`fully_shard` changes networks in place, so that a pipeline keeps its objects. With LoRA, only the frozen base is
sharded. Adapters stay whole on every process, and so do their gradients, average, reference and checkpoints. Then all
results equal those without sharding bit for bit. If all weights are trained, gradients, average, reference and optimizer
moments are sharded, too.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed.fsdp_lockstep import Lockstep
from flowgrpo.training.distributed.gpu_layout import of_machine
from flowgrpo.training.weights import low_precision_copies
from flowgrpo.training.weights.trained_weights import Weights

# Layers whose weights autocast casts.
AUTOCAST = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def check(config: RunConfig) -> None:
    """Raise InputError if a config combines sharding with an option that sharded networks do not support."""
    if config.run.sharding == "none":
        return
    if config.model.lora is None:
        _check_full(config)
    for word, key in low_precision_copies.of_copies(config).items():
        raise InputError(
            f"run.sharding: the copy of the network that {key}={word} asks for cannot be cut; set run.sharding=none, or "
            f"{key}=null"
        )
    if config.model.offload_activations and not config.model.gradient_checkpointing:
        raise InputError(
            "run.sharding: model.offload_activations would take each gathered weight for an activation; set "
            "model.gradient_checkpointing=true too, or model.offload_activations=false"
        )


def can(config: RunConfig) -> bool:
    """Return whether a run that does not shard its networks could do so."""
    if config.run.sharding != "none" or config.run.generators or config.run.evaluators or config.exchanges_base:
        return False
    run = config.run.model_copy(update={"sharding": "fsdp2"})
    try:
        check(config.model_copy(update={"run": run}))
    except InputError:
        return False
    return True


def _check_full(config: RunConfig) -> None:
    name = config.train.optimizer.name
    if name != "adamw":
        raise InputError(
            f"run.sharding: train.optimizer.name={name} keeps moments that cannot be cut, take adamw, or run.sharding=none"
        )
    if config.model.dtype == "float16":
        raise InputError(
            "run.sharding: the gradients of float16 are scaled, and those of weights in shards cannot be; "
            "set model.dtype=bfloat16, or run.sharding=none"
        )


def among(form: str, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many of the running processes share one copy of the networks; 1 without sharding."""
    if form == "none" or not distributed.is_initialized():
        return 1
    processes = distributed.get_world_size()
    return of_machine(processes, environment) if form == "hsdp" else processes


def applies(form: str) -> bool:
    """Return whether several processes share one copy of the networks."""
    return among(form) > 1


def shard(
    modules: Mapping[str, torch.nn.Module],
    make: Callable[[], Weights],
    *,
    form: str,
    device: torch.device,
    full: bool,
    gather: torch.dtype | None = None,
) -> Weights:
    """Shard networks if several processes share a copy of them (`applies`), and return their trained weights.

    Blocks move to the device one at a time, so that a device never holds a whole network. Raises InputError as
    `blocks`, if machines have different numbers of processes, or if torch cannot shard a quantised base.

    Args:
        make: builds the trained weights: adapters before sharding, full weights after it.
        form: value of `run.sharding`: `fsdp2` shards over all processes, `hsdp` over the processes of a machine.
        full: whether all weights are trained, in float32.
        gather: dtype of autocast, in which matrices are gathered if `travels_in_half`; None for float32.
    """
    if not applies(form):
        return make()
    mesh = _mesh(form, device)
    if full:
        for network in modules.values():
            _cut_learning(network, mesh, gather)
        weights = make()
    else:
        weights = make()
        _cut_frozen(weights, mesh)
        weights.to(device)
    weights.lockstep = Lockstep(list(modules.values()), weights.as_reference if full else None)
    return weights


def _cut_frozen(weights: Weights, mesh: DeviceMesh) -> None:
    adapters = set(weights.parameters)
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


def _cut_learning(network: torch.nn.Module, mesh: DeviceMesh, gather: torch.dtype | None) -> None:
    """Shard a network that is fully trained in float32, so that gradients are summed over processes.

    A weight that a process does not use, such as an expert, adds zeros to the sum. A weight that no process uses has
    gradient 0, but weight decay still applies.
    """
    sums_unreached = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    experts = any(re.search("expert|moe", type(m).__name__.lower()) for m in network.modules())
    if experts and not sums_unreached:
        raise InputError(
            f"run.sharding: torch {torch.__version__} cannot sum the gradients of experts that not all processes reach; "
            "take torch 2.15, or run.sharding=none"
        )
    for block in (*blocks(network), network):
        block.float().requires_grad_(True)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=_gather_policy(block, gather))
    for part in (m for m in network.modules() if isinstance(m, FSDPModule)):
        part.set_gradient_divide_factor(1.0)  # by default torch takes the mean
        part.set_force_sum_reduction_for_comms(True)  # by default torch scales within the reduction, which gloo cannot
        if sums_unreached:
            part.set_reduce_scatter_unused_params(True, recurse=False)


def travels_in_half() -> bool:
    """Return whether torch (from 2.15) can gather only the matrices of a block in half precision."""
    return "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters


def _gather_policy(block: torch.nn.Module, gather: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return FSDP's policy: weights that autocast casts are gathered in its dtype, gradients are reduced in float32."""
    if gather is None or not travels_in_half():
        return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = [m for m in block.modules() if isinstance(m, AUTOCAST)]
    others = {id(p) for m in block.modules() if not isinstance(m, AUTOCAST) for p in m.parameters(recurse=False)}
    cast = {id(m.weight) for m in layers} - others  # a head may share its weight with an embedding
    return MixedPrecisionPolicy(
        param_dtype=gather,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda p: gather if id(p) in cast else p.dtype,
    )


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
    """Return the repeated blocks of a network, without blocks inside of blocks.

    They are the modules whose class is named in the network's `_repeated_blocks` or `_no_split_modules`, or else the
    members of its module lists. Raises InputError if the blocks hold less than half of the weights, since all other
    weights are gathered at once.
    """
    names = {*(getattr(network, "_repeated_blocks", None) or ()), *(getattr(network, "_no_split_modules", None) or ())}
    named = [module for module in network.modules() if type(module).__name__ in names]
    listed = (m for each in network.modules() if isinstance(each, torch.nn.ModuleList) for m in each)
    repeated: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for block in named or listed:
        if block not in inside and any(True for _ in block.parameters()):
            inside.update(block.modules())
            repeated.append(block)
    numbers = sum(p.numel() for block in repeated for p in block.parameters())
    if 2 * numbers < sum(p.numel() for p in network.parameters()):
        raise InputError(
            f"run.sharding: most of {type(network).__name__} lies in none of its repeated blocks; set run.sharding=none"
        )
    return repeated
