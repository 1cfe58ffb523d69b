"""The trained weights: LoRA adapters or whole networks, their average, and earlier policies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.lora import Lora
from flowgrpo.schema.sections import Ema
from flowgrpo.training.distributed.dtensors import follow, local, shard_like
from flowgrpo.training.distributed.fsdp_lockstep import Lockstep
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.old_policies import Bank, Decay, Snapshots, clones

if TYPE_CHECKING:  # a plan does not need these libraries
    import peft
    import transformers
    from peft import LoraConfig
    from peft.tuners import lora as lora_layers
    from peft.tuners import tuners_utils
else:
    peft = lazy("peft")
    transformers = lazy("transformers")
    lora_layers = lazy("peft.tuners.lora")
    tuners_utils = lazy("peft.tuners.tuners_utils")

EMBEDDINGS = tuple(f"{name}.weight" for name in ("embed_tokens", "wte", "word_embeddings", "tok_embeddings"))
AVERAGE, REFERENCE, OLD, BANK = "average.", "reference.", "old.", "bank."  # prefixes of tensor names
OTHER_POLICIES = (REFERENCE, OLD, BANK)
# Attention projections of language models.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "attn_out")
# Attention projections of diffusers' transformers, in the image stream and the text stream.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class Weights:
    """The trained weights of networks, with their average and earlier policies.

    The tensors of each policy, and of the average `ema`, are in the order of `parameters`. If fully trained networks
    are sharded, these tensors are sharded, too.

    Args:
        modules: networks by name. With LoRA they get adapters on a frozen base. Without, all weights are trained in
            float32.
        lora: peft's config of new adapters, or the initial adapters by network, or None for full fine-tuning.
        ema: moving average to keep, or None; see `Ema.decay_at`.
        reference: policy of `reference()`. `fixed`: the initial weights. `base`: no adapters. `moving`: a copy taken
            every `refresh` optimizer steps. `teacher`: set by `put_reference` or `put_base`. None: keep no
            copy; `reference()` then only disables adapters.
        old: decay of the old policy, or None.
        bank: snapshots of the live policy to keep, or None.
        extra_modules: further small networks by name, fully trained.
    """

    def __init__(
        self,
        modules: dict[str, torch.nn.Module],
        lora: LoraConfig | Mapping[str, Adapter] | None,
        *,
        ema: Ema | None = None,
        reference: str | None = None,
        refresh: int = 1,
        old: Decay | None = None,
        bank: Bank | None = None,
        extra_modules: Mapping[str, torch.nn.Module] = MappingProxyType({}),
    ):
        self.modules, self.extra_modules, self._ema_config = modules, extra_modules, ema
        injected: dict[str, LoraConfig] = {}
        self.lora = None if lora is None else injected  # peft's config by network
        # The initial adapters by network; {} for new adapters.
        self.begun: Mapping[str, Adapter] = lora if isinstance(lora, Mapping) else {}
        shifted = [p for name, adapter in self.begun.items() for p in adapter.shifted(modules[name])]
        # Pairs of a tensor of the base and of the reference's base, where they differ.
        self._base = [(p, p.detach().clone()) for p in shifted if reference == "base"]
        for name, module in (*modules.items(), *extra_modules.items()):
            if lora is None or name in extra_modules:
                module.float().requires_grad_(True)
            else:
                if isinstance(lora, Mapping):
                    injected[name] = lora[name].inject(module)
                else:
                    injected[name] = lora
                    peft.inject_adapter_in_model(lora, module)
                for p in module.parameters():
                    p.data = p.data.float() if p.requires_grad else p.data
                _compute_in_input_dtype(module)
        self.named = {
            f"{name}.{path}": p
            for name, module in (*modules.items(), *extra_modules.items())
            for path, p in module.named_parameters()
            if p.requires_grad
        }
        self.lockstep = Lockstep()
        self.updates = 0
        self.ema = clones(self.parameters) if ema is not None else None
        self._refresh = refresh if reference == "moving" else None
        self._has_teacher = reference == "teacher"
        differs = lora is None or isinstance(lora, Mapping)  # whether training starts from other weights than the base
        copied: dict[str | None, bool] = {"moving": True, "teacher": True, "fixed": differs, "base": lora is None}
        self._reference = clones(self.parameters) if copied.get(reference) else None
        self._keeps_start = lora is None and reference in ("fixed", "base")
        self._decay = old
        self._old = clones(self.parameters) if old is not None else None
        self.snapshots = Snapshots(bank, self.parameters)

    def to(self, device: torch.device) -> None:
        """Move the trained tensors, the average and earlier policies to a device. None of these may be sharded."""
        for tensor in (tensor for values in (self.parameters, *self._copies().values()) for tensor in values):
            tensor.data = tensor.data.to(device)

    def _copies(self) -> dict[str, Sequence[torch.Tensor]]:
        """Return the tensors of the average and of earlier policies, by the prefix of their names."""
        copies = {AVERAGE: self.ema, REFERENCE: self._reference, OLD: self._old}
        copies |= {f"{BANK}{n}.": snapshot for n, snapshot in self.snapshots.kept.items()}
        return {prefix: values for prefix, values in copies.items() if values is not None}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained tensors, in a fixed order."""
        return list(self.named.values())

    @torch.no_grad()
    def after_update(self) -> None:
        """Update the average and a moving reference after an optimizer step."""
        step, self.updates = self.updates, self.updates + 1
        if self.ema is not None and self._ema_config is not None and (decay := self._ema_config.decay_at(step)) < 1:
            follow(self.ema, self.parameters, decay)
        if self._reference is not None and self._refresh is not None and self.updates % self._refresh == 0:
            follow(self._reference, self.parameters, 0.0)

    @torch.no_grad()
    def after_iteration(self) -> None:
        """Update the old policy and the bank after the optimizer steps of an iteration."""
        if self._old is not None and self._decay is not None:
            follow(self._old, self.parameters, self._decay.at(self.updates))
        self.snapshots.fill(self.updates)

    def draw_snapshot(self, *address: Any) -> None:
        """Draw a snapshot as the policy `bank`, if there is a bank; see `Bank.draw`."""
        self.snapshots.draw(self.updates, *address)

    def begin_at(self, updates: int) -> None:
        """Set the number of optimizer steps, and allocate the snapshots that exist after them."""
        self.updates = updates
        self.snapshots.fill(updates)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which networks compute with the average, if there is one."""
        return nullcontext() if self.ema is None else self.swap(self.ema)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Return a context in which networks compute as the reference, without gradient."""
        if self._reference is not None:
            with self.as_reference(), self.lockstep.reference():
                yield
            return
        self._swap_base()
        self._enable_adapters(False)
        try:
            yield
        finally:
            self._enable_adapters(True)
            self._swap_base()

    def _enable_adapters(self, on: bool) -> None:
        for layer in self._adapted:
            layer.enable_adapters(on)

    def enable_training(self, on: bool) -> None:
        """Switch between the trained weights (`on`) and the weights before training.

        Full weights are swapped with a copy of the initial ones, so calls with False and True must alternate. Raises
        RuntimeError without a copy.
        """
        if self.lora is not None:
            self._enable_adapters(on)
        elif self._keeps_start and self._reference is not None:
            self._swap(self._reference)
        else:
            raise RuntimeError("no copy of the weights is kept that training began with")

    @cached_property
    def _adapted(self) -> list[tuners_utils.BaseTunerLayer]:
        """All layers with adapters. They do not change after `__init__`."""
        networks = self.modules.values()
        return [m for network in networks for m in network.modules() if isinstance(m, tuners_utils.BaseTunerLayer)]

    def policy(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which networks compute, without gradient, as `live`, `old`, `reference` or `bank`."""
        if name == "live":
            return nullcontext()
        if name == "reference":
            return self.reference()
        values = self._old if name == "old" else self.snapshots.drawn
        assert values is not None
        return self.swap(values)

    def as_reference(self) -> AbstractContextManager[None]:
        """Return a context with the reference's copy swapped in, which does not involve the lockstep."""
        assert self._reference is not None
        return self.swap(self._reference)

    @contextmanager
    def swap(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """Return a context in which the trained tensors have the contents of `values`, and `values` theirs."""
        self._swap(values)
        try:
            yield
        finally:
            self._swap(values)

    @torch.no_grad()
    def _swap(self, values: Sequence[torch.Tensor]) -> None:
        """Swap the trained tensors with `values`. Shards are copied in place, since FSDP would not gather a new `data`."""
        sharded = [network for network in self.modules.values() if isinstance(network, FSDPModule)]
        for module in (m for network in sharded for m in network.modules() if isinstance(m, FSDPModule)):
            module.reshard()
        for p, value in zip(self.parameters, values, strict=True):
            if isinstance(p, DTensor):
                here, other = local(p), local(value)
                before = here.clone()
                here.copy_(other)
                other.copy_(before)
            else:
                p.data, value.data = value.data, p.data

    @torch.no_grad()
    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Copy `values` into the trained tensors, which must not be sharded."""
        for p, value in zip(self.parameters, values, strict=True):
            p.copy_(value)

    @torch.no_grad()
    def put_reference(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy whole (unsharded) tensors, keyed as in `named`, into the reference."""
        assert self._reference is not None
        for copied, name in zip(self._reference, self.named, strict=True):
            local(copied).copy_(local(shard_like(values[name], copied)))

    @torch.no_grad()
    def put_base(self, values: Mapping[str, torch.Tensor]) -> None:
        """Use another base without adapters as the reference; `values` are its tensors by `NETWORK.PATH`.

        Raises KeyError if a parameter or buffer is missing.
        """
        self._reference, self._has_teacher = None, False  # not stored in checkpoints
        for network, module in self.modules.items():
            base = {path for path in module.state_dict() if ".lora_" not in path}
            for path, tensor in (*module.named_parameters(), *module.named_buffers()):
                if path in base:
                    name = f"{network}.{path.replace('.base_layer', '')}"
                    self._base.append((tensor, values[name].to(tensor)))

    def _swap_base(self) -> None:
        """Swap the tensors of the frozen base with those of the reference's base, if they differ."""
        for here, other in self._base:
            here.data, other.data = other.data, here.data

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint stores: trained tensors, average and earlier policies, by prefixed name.

        A reference is included only if it moves or is a teacher.
        """
        tensors = {name: p.data for name, p in self.named.items()}
        for prefix, values in self._copies().items():
            if prefix != REFERENCE or self._refresh is not None or self._has_teacher:
                tensors |= {f"{prefix}{name}": value for name, value in zip(self.named, values, strict=True)}
        return tensors

    def adapter_state(self, module: str) -> dict[str, torch.Tensor]:
        """Return the LoRA tensors of a network under peft's names, as diffusers saves them."""
        return peft.get_peft_model_state_dict(self.modules[module], adapter_name="default")


class Half(torch.nn.Module):
    """A float32 matrix of a linear layer's adapter that computes in the dtype of its input."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product (..., out) with x (..., in)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), bias)


def _compute_in_input_dtype(module: torch.nn.Module) -> None:
    """Make the adapters of linear layers compute in the dtype of the base.

    peft would cast their inputs to float32, a copy for each adapter, which the graph keeps until its backward pass.
    """
    for layer in module.modules():
        if isinstance(layer, lora_layers.Linear):
            layer.cast_input_dtype_enabled = False
            for halves in (layer.lora_A, layer.lora_B):
                for name, linear in halves.items():
                    halves[name] = Half(cast("torch.nn.Linear", linear))


def _attention_layers(modules: dict[str, torch.nn.Module]) -> tuple[str, ...]:
    """Return the paths of linear layers in attention modules; without such (LLaDA), of those named in `PROJECTIONS`."""
    paths = set()
    for module in modules.values():
        attention = [
            path for path, m in module.named_modules() if re.search("attention|attn", type(m).__name__.lower())
        ]
        linear = [path for path, m in module.named_modules() if isinstance(m, torch.nn.Linear)]
        inside_attention = {path for path in linear if any(path.startswith(f"{outer}.") for outer in attention)}
        paths |= inside_attention or {path for path in linear if path.split(".")[-1] in PROJECTIONS}
    return tuple(sorted(paths))


def _linear_layers(modules: dict[str, torch.nn.Module]) -> tuple[str, ...]:
    """Return the paths of all linear layers except a language model's output head, like peft's `all-linear`."""
    paths = set()
    for module in modules.values():
        head = module.get_output_embeddings() if isinstance(module, transformers.PreTrainedModel) else None
        paths |= {path for path, m in module.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    return tuple(sorted(paths))


def lora_config(
    rank: int, alpha: float, targets: str | Sequence[str], modules: dict[str, torch.nn.Module]
) -> LoraConfig:
    """Return peft's config of new adapters with Gaussian initialisation.

    `targets` are names of layers, or `auto` (attention projections) or `all-linear`. Raises InputError if a name
    matches no layer.
    """
    if targets == "all-linear":
        targets = _linear_layers(modules)
    names = ATTENTION if targets == "auto" else tuple(targets)
    if targets == "auto" and not any(
        path.endswith(ATTENTION) for m in modules.values() for path, _ in m.named_modules()
    ):
        names = _attention_layers(modules)
    paths = [
        path for module in modules.values() for path, m in module.named_modules() if isinstance(m, torch.nn.Linear)
    ]
    matched = [name for name in names if any(path == name or path.endswith("." + name) for path in paths)]
    missing = [name for name in names if name not in matched]
    if not matched and targets == "auto":
        raise InputError("model.lora.targets: auto finds no attention in the model, name its linear layers")
    if missing and targets != "auto":
        ends = sorted({path.split(".")[-1] for path in paths if not path.split(".")[-1].isdigit()})
        raise InputError(f"model.lora.targets: no linear layer is named {missing[0]!r}, there are {', '.join(ends)}")
    numbers: dict[str, Any] = {"r": rank, "lora_alpha": alpha}  # Any: peft's type of alpha is int, but any number works
    return peft.LoraConfig(**numbers, target_modules=matched, init_lora_weights="gaussian")


def adapter_size(tensors: Mapping[str, Shape], lora: Lora) -> int:
    """Estimate the number of weights of new adapters on a network, given the shapes of its tensors.

    With `all-linear`, small embeddings are counted as layers.
    """
    assert lora.rank is not None
    assert lora.targets is not None
    matrices = [(key, s) for key, s in tensors.items() if len(s) == 2]
    if lora.targets == "all-linear":  # a language model's head has the shape of its embedding
        embeddings = {shape for key, shape in matrices if key.endswith(EMBEDDINGS)}
        return sum(lora.rank * sum(s) for key, s in matrices if key.endswith(".weight") and s not in embeddings)
    targets = ATTENTION if lora.targets == "auto" else tuple(lora.targets)
    layers = [s for key, s in matrices if key.endswith(tuple(f"{t}.weight" for t in targets))]
    if not layers:  # `auto` on a model with other names
        words = ("attn", "attention", *PROJECTIONS)
        layers = [s for key, s in matrices if any(word in key for word in words)]
    return sum(lora.rank * sum(shape) for shape in layers)
