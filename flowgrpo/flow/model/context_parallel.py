"""Context parallelism: the processes of one data shard split each call of the network along its sequence.

diffusers cuts the network's input into equal parts, exchanges heads for tokens around each attention (Ulysses, arXiv
2309.14509) and gathers the result. So the pipeline sees whole latents on every process. The backward pass runs through
each process's own part of the sequence, so the whole gradient is the sum of the gradients of the processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from diffusers import ContextParallelConfig, ModelMixin
from diffusers.hooks.context_parallel import ContextParallelSplitHook
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from flowgrpo.data.embedded import place_of
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.loading import load, weightless_networks
from flowgrpo.flow.pipeline.networks.attention_backends import AttentionBackend
from flowgrpo.flow.pipeline.networks.traits import SHARING, TRAINED
from flowgrpo.training.model_files.hub_files import one_sentence

KEY = "run.context_parallel"
INSTEAD = "set it to 1; run.sharding shares the weights of any model"
# Networks whose gradient was tested against that of one process. Calls of LTX and LTX 2 fail. For Helios, which gathers
# after every layer, the parts of the gradient do not add up to the whole.
SEEN = (
    "ChronoEditTransformer3DModel",
    "Flux2Transformer2DModel",
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
)
TEXT, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"


def check(config: Config) -> None:
    """Raise InputError if network, heads, attention or another setting forbid split calls. Only configs are read."""
    degree = config.run.context_parallel
    if degree == 1:
        return
    if config.model.compile:
        raise InputError(f"{KEY}: it was never tested with model.compile; set that to false")
    _check_attention(config.model.attention)
    index = load.index_of(config.model.path)
    beside = next((name for name in index if name.startswith(SHARING)), None)
    if beside is not None:
        raise InputError(f"{KEY}: the {beside} of {config.model.path} computes on whole sequences; {INSTEAD}")
    kinds = {name: kind for name, kind in weightless_networks.classes(index).items() if name.startswith(TRAINED)}
    if not kinds:
        raise InputError(
            f"{KEY}: {config.model.path} has no network of diffusers whose calls could be shared; {INSTEAD}"
        )
    for name, kind in kinds.items():
        if getattr(kind, "_cp_plan", None) is None:
            raise InputError(f"{KEY}: diffusers has no plan by which calls of {kind.__name__} are shared; {INSTEAD}")
        if kind.__name__ not in SEEN:
            raise InputError(
                f"{KEY}: by diffusers' plan for {kind.__name__} its gradient was not seen to be whole; {INSTEAD}"
            )
        with one_sentence(config.model.path):
            written = kind.load_config(place_of(config.model.path), subfolder=name)
        default = inspect.signature(kind.__init__).parameters["num_attention_heads"].default
        heads = written.get("num_attention_heads", default)
        if heads % degree:
            raise InputError(
                f"{KEY}: {degree} processes cannot share the {heads} attention heads of {name} evenly, take "
                f"{_nearest(heads, degree)}"
            )


def check_device(config: Config) -> None:
    """Raise InputError if calls are to be split but there is no accelerator."""
    if config.run.context_parallel > 1 and torch.accelerator.device_count() == 0:
        raise InputError(f"{KEY}: diffusers shares calls among accelerators, and there is none here; set it to 1")


def share_calls(networks: Mapping[str, ModelMixin], degree: int, device: torch.device) -> None:
    """Let each group of `degree` consecutive ranks split the calls of the networks from now on.

    Inject adapters before: the hooks that gather must wrap the adapted layers.
    """
    mesh = init_device_mesh(
        device.type, (distributed.get_world_size() // degree, 1, degree), mesh_dim_names=("data", "ring", "ulysses")
    )
    for network in networks.values():
        network.enable_parallelism(config=ContextParallelConfig(ulysses_degree=degree, mesh=mesh["ring", "ulysses"]))
        for hook in _split_hooks(network):
            _refuse_remainders(hook, type(network).__name__, degree)
        if MASK in inspect.signature(network.forward).parameters:
            network.register_forward_pre_hook(_padding(degree), with_kwargs=True)


def _check_attention(name: AttentionBackend | None) -> None:
    shared = {str(backend) for backend in _AttentionBackendRegistry._supports_context_parallel} - {"_native_npu"}
    asked = AttentionBackendName(name) if name else _AttentionBackendRegistry.get_active_backend()[0]
    if asked.value not in shared:
        choices = ", ".join(sorted(backend for backend in shared if "sage" not in backend))
        raise InputError(f"{KEY}: calls with the attention {asked.value} cannot be shared, take {choices}")


def _nearest(number: int, degree: int) -> int:
    return next(n for n in range(degree - 1, 0, -1) if number % n == 0)


def _split_hooks(network: torch.nn.Module) -> Iterator[ContextParallelSplitHook]:
    for module in network.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hooks = () if registry is None else registry.hooks.values()
        yield from (hook for hook in hooks if isinstance(hook, ContextParallelSplitHook))


def _refuse_remainders(hook: ContextParallelSplitHook, name: str, degree: int) -> None:
    """Make a hook raise a readable InputError if a sequence does not divide evenly; diffusers only asserts."""
    cut = hook._prepare_cp_input

    def checked(x: torch.Tensor, plan: Any) -> torch.Tensor:
        length = x.shape[plan.split_dim] if plan.expected_dims in (None, x.ndim) else degree
        if length % degree:
            raise InputError(
                f"{KEY}: {degree} processes cannot share a sequence of {length} in {name} evenly, take "
                f"{_nearest(length, degree)}, or another height, width, num_frames or max_sequence_length in model.call"
            )
        return cut(x, plan)

    hook._prepare_cp_input = checked


def _padding(degree: int) -> Callable[..., Any]:
    """Return a hook that pads a network's text embeddings to a length divisible by `degree`, with masked tokens."""

    def pad(
        network: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        text = kwargs.get(TEXT)
        if text is None or text.shape[1] % degree == 0:
            return None
        missing = -text.shape[1] % degree
        mask = kwargs.get(MASK)
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask
        padded = torch.nn.functional.pad
        return args, {**kwargs, TEXT: padded(text, (0, 0, 0, missing)), MASK: padded(mask, (0, missing))}

    return pad
