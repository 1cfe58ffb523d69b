"""Networks in shards: each process holds a part of their weights, and gathers a block when it computes it.

torch's `fully_shard` cuts the networks in place, so that a pipeline keeps the objects it knows. Under a LoRA the frozen base
is cut, and the adapters stay whole on every process: their gradients, average, reference, checkpoints and export are those
of a run without shards, and so is every number: a gathered weight is the weight, to the bit. Where all weights are trained,
their gradients, average, reference and the optimizer's moments are shards, too.
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

# Layers whose matrix autocast casts, whatever the input.
AUTOCAST = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def check(config: RunConfig) -> None:
    """Refuse what cannot be cut into shards.

    Raises:
        InputError: drafts are sampled or trees finished by a copy of it, activations are
            offloaded with it, or what trains all weights cannot train shards.
    """
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
    """Whether the networks of a run, now whole on every process, could be cut into shards."""
    if config.run.sharding != "none" or config.run.generators or config.run.evaluators or config.exchanges_base:
        return False
    run = config.run.model_copy(update={"sharding": "fsdp2"})
    try:
        check(config.model_copy(update={"run": run}))
    except InputError:
        return False
    return True


def _check_full(config: RunConfig) -> None:
    """Refuse what cannot be done with shards of weights that learn."""
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
    """How many processes share networks that are to lie in shards, of those that run; 1 where each holds the whole."""
    if form == "none" or not distributed.is_initialized():
        return 1
    processes = distributed.get_world_size()
    return of_machine(processes, environment) if form == "hsdp" else processes


def applies(form: str) -> bool:
    """Whether there are processes to share networks that are to lie in shards."""
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
    """The weights of networks, cut into shards where `applies`; their processes take turns then.

    Blocks go to the device one by one, so that no device holds all of a network that lies in host memory.

    Args:
        modules: the networks.
        make: makes the weights of them: adapters before they are cut, all of them after.
        form: of `run.sharding`: `fsdp2` over all processes; `hsdp` over those of a machine, each of which holds it all.
        full: whether all weights are trained; these are float32.
        gather: the type of matrices in which they compute, under autocast; they travel in it, too.

    Raises:
        InputError: most of a network lies in no block, machines have unequal numbers of processes, or torch cannot cut a
            quantised base.
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
    """Cut the networks under adapters, which stay whole."""
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
    """Cut a network that is trained whole: in float32, its gradients summed over the processes.

    Weights that no row of a process reaches, experts say, take part in the sum with zeros; those that no row at all reaches
    get a gradient of 0, which the optimizer's weight decay does not skip.
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
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=_travelling(block, gather))
    for part in (m for m in network.modules() if isinstance(m, FSDPModule)):
        part.set_gradient_divide_factor(1.0)  # torch would take the mean
        part.set_force_sum_reduction_for_comms(True)  # and multiply in the sum, which gloo cannot
        if sums_unreached:
            part.set_reduce_scatter_unused_params(True, recurse=False)


def travels_in_half() -> bool:
    """Whether weights of float32 can travel in half precision; before 2.15 torch has one type for a block, float32."""
    return "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters


def _travelling(block: torch.nn.Module, gather: torch.dtype | None) -> MixedPrecisionPolicy:
    """How weights travel: those that autocast casts in its type, all others as they are; gradients in float32."""
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
    """The repeated blocks of a network, as its class names them; else the members of its lists. None lies in another.

    Raises:
        InputError: they are less than half of it, so that most would be gathered at once.
    """
    names = {*(getattr(network, "_repeated_blocks", None) or ()), *(getattr(network, "_no_split_modules", None) or ())}
    named = [module for module in network.modules() if type(module).__name__ in names]
    listed = (m for each in network.modules() if isinstance(each, torch.nn.ModuleList) for m in each)
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
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
