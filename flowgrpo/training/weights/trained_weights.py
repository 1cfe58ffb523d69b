"""The weights being trained: LoRA adapters or whole networks, their average, and earlier policies."""

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
from flowgrpo.training.distributed.dtensors import follow, local, placed_as
from flowgrpo.training.distributed.fsdp_lockstep import Lockstep
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.old_policies import Bank, Decay, Snapshots

if TYPE_CHECKING:  # a plan counts adapters without them
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
AVERAGE, REFERENCE, OLD, BANK = "average.", "reference.", "old.", "bank."  # what the names of their tensors begin with
OTHER_POLICIES = (REFERENCE, OLD, BANK)  # of other policies than what was learned
# The attention projections of language models.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "attn_out")
# The attention projections of diffusers' transformers, of the image and of the text stream.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class Weights:
    """The trained weights of named modules; `ema` are the averaged tensors in the order of `parameters`, or None.

    Networks in shards may be trained whole: then their tensors, average and reference are shards, too.

    Args:
        modules: networks by name. With LoRA they get adapters and stay frozen otherwise; without, all of them is trained
            in float32.
        lora: rank, alpha and target names of new adapters; or by module the adapters to start from; or None for full
            fine-tuning.
        ema: which exponential moving average is kept, or None. Its decay is warmed up as
            min((1 + t) / (warmup + t), decay) at optimizer step t, counted from 0; Flow-GRPO's code has a warmup of 10.
        reference: what `reference()` will be: `fixed` weights as they started (a copy is kept, unless they are adapters that
            started as none), the `base` without adapters, `moving` ones, a copy of the live weights taken every `refresh`
            optimizer steps, or a `teacher`, to be put by `put_reference` or `put_base`; None if it will not be needed.
        old: how the old policy follows the live one; None if it will not be needed.
        bank: which snapshots of the live policy are kept; None if none will be needed.
        extra_modules: further small modules by name, of which every weight is trained.

    Attributes:
        lora: peft's configuration of each module's adapters, or None.
        begun: the adapters that training started from, by module; {} where these are new, and when a run has kept them.
        snapshots: that the bank keeps.
        lockstep: the turns of processes that hold the modules in shards.
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
        self.lora = None if lora is None else injected
        self.begun: Mapping[str, Adapter] = lora if isinstance(lora, Mapping) else {}
        shifted = [p for name, adapter in self.begun.items() for p in adapter.shifted(modules[name])]
        # Tensors of the base, and the reference's in their places.
        self._base = [(p, p.detach().clone()) for p in shifted if reference == "base"]
        for name, module in (*modules.items(), *extra_modules.items()):
            if lora is None or name in extra_modules:
                module.float().requires_grad_(True)
            else:
                injected[name] = lora[name].inject(module) if isinstance(lora, Mapping) else _new(lora, module)
                for p in module.parameters():
                    p.data = p.data.float() if p.requires_grad else p.data  # adapters learn in float32 on any base
                _compute_as_their_input(module)
        self.named = {
            f"{name}.{path}": p
            for name, module in (*modules.items(), *extra_modules.items())
            for path, p in module.named_parameters()
            if p.requires_grad
        }
        self.lockstep = Lockstep()
        self.updates = 0
        self.ema = [p.detach().clone() for p in self.parameters] if ema is not None else None
        self._refresh = refresh if reference == "moving" else None
        self._taught = reference == "teacher"
        started = lora is None or isinstance(lora, Mapping)  # as something else than the base
        copied: dict[str | None, bool] = {"moving": True, "teacher": True, "fixed": started, "base": lora is None}
        self._reference = [p.detach().clone() for p in self.parameters] if copied.get(reference) else None
        self._keeps_base = lora is None and reference in ("fixed", "base")
        self._decay = old
        self._old = [p.detach().clone() for p in self.parameters] if old is not None else None
        self.snapshots = Snapshots(bank, self.parameters)

    def to(self, device: torch.device) -> None:
        """Put the trained tensors and the copies beside them, none of them shards, on a device."""
        for p in self.parameters:
            p.data = p.data.to(device)
        self.ema = None if self.ema is None else [slow.to(device) for slow in self.ema]
        self._reference = None if self._reference is None else [kept.to(device) for kept in self._reference]
        self._old = None if self._old is None else [kept.to(device) for kept in self._old]
        self.snapshots.to(device)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained tensors, in a fixed order."""
        return list(self.named.values())

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the average and a moving reference after an optimizer step, where their time has come."""
        step, self.updates = self.updates, self.updates + 1
        if self.ema is not None and self._ema_config is not None and (decay := self._ema_config.decay_at(step)) < 1:
            follow(self.ema, self.parameters, decay)
        if self._reference is not None and self._refresh is not None and self.updates % self._refresh == 0:
            follow(self._reference, self.parameters, 0.0)

    @torch.no_grad()
    def after_iteration(self) -> None:
        """Let the old policy follow, and take a snapshot where one is due, when an iteration's optimizer steps are taken."""
        if self._old is not None and self._decay is not None:
            follow(self._old, self.parameters, self._decay.at(self.updates))
        self.snapshots.fill(self.updates)

    def draw_snapshot(self, *address: Any) -> None:
        """Draw the snapshot that is the policy `bank` from here on, where there is a bank; see `Bank.draw`."""
        self.snapshots.draw(self.updates, *address)

    def begin_at(self, updates: int) -> None:
        """Count so many optimizer steps as taken, and make room for the snapshots that are kept then."""
        self.updates = updates
        self.snapshots.fill(updates)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the averaged weights inside this context, if an average is kept."""
        with nullcontext() if self.ema is None else self.swapped(self.ema):
            yield

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Compute as the reference inside this context, without gradient: with its copy in place, or with adapters off."""
        if self._reference is not None:
            with self.as_reference(), self.lockstep.reference():
                yield
            return
        self._exchange_base()
        self._enable_adapters(False)
        try:
            yield
        finally:
            self._enable_adapters(True)
            self._exchange_base()

    def _enable_adapters(self, on: bool) -> None:
        for layer in self._adapted:
            layer.enable_adapters(on)

    def enable_training(self, on: bool) -> None:
        """Compute without what was trained (False), as the model did before, or with it again (True).

        Adapters are switched; where every weight is trained, the copy of those that it began with takes its place.

        Raises:
            RuntimeError: there is no such copy.
        """
        if self.lora is not None:
            self._enable_adapters(on)
        elif self._keeps_base and self._reference is not None:
            self._exchange(self._reference)
        else:
            raise RuntimeError("no copy of the weights is kept that training began with")

    @cached_property
    def _adapted(self) -> list[tuners_utils.BaseTunerLayer]:
        """All layers that have adapters: no layer gets one, or takes the place of one that has, after `__init__`."""
        networks = self.modules.values()
        return [m for network in networks for m in network.modules() if isinstance(m, tuners_utils.BaseTunerLayer)]

    def policy(self, name: str) -> AbstractContextManager[None]:
        """A context in which to compute, without gradient, as the `live` policy, `old`, `reference`, or the `bank`'s."""
        if name == "live":
            return nullcontext()
        if name == "reference":
            return self.reference()
        values = self._old if name == "old" else self.snapshots.drawn
        assert values is not None
        return self.swapped(values)

    def as_reference(self) -> AbstractContextManager[None]:
        """A context with the reference's copy in place, for which no other process is asked."""
        assert self._reference is not None
        return self.swapped(self._reference)

    @contextmanager
    def swapped(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """Compute with other trained tensors inside this context; those that stand are in their place meanwhile."""
        self._exchange(values)
        try:
            yield
        finally:
            self._exchange(values)

    @torch.no_grad()
    def _exchange(self, values: Sequence[torch.Tensor]) -> None:
        """Exchange the trained tensors with others. Of shards the contents: new `data` would never be gathered."""
        sharded = [network for network in self.modules.values() if isinstance(network, FSDPModule)]
        for module in (m for network in sharded for m in network.modules() if isinstance(m, FSDPModule)):
            module.reshard()
        for p, value in zip(self.parameters, values, strict=True):
            if isinstance(p, DTensor):
                here, other = local(p), local(value)
                kept = here.clone()
                here.copy_(other)
                other.copy_(kept)
            else:
                p.data, value.data = value.data, p.data

    @torch.no_grad()
    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Copy values to the trained tensors, which are whole, in the order of `parameters`."""
        for p, value in zip(self.parameters, values, strict=True):
            p.copy_(value)

    @torch.no_grad()
    def put_reference(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy values, whole ones by the names of `named`, to the reference's copy."""
        assert self._reference is not None
        for kept, name in zip(self._reference, self.named, strict=True):
            local(kept).copy_(local(placed_as(values[name], kept)))

    @torch.no_grad()
    def put_base(self, values: Mapping[str, torch.Tensor]) -> None:
        """Make other weights of the frozen networks the reference, without adapters: they are copied beside the base.

        Args:
            values: by the names of networks and of tensors as they are without adapters.

        Raises:
            KeyError: one of the networks' parameters is not among them.
        """
        self._reference, self._taught = None, False  # it is no state of the run, but another base
        for network, module in self.modules.items():
            kept = {path for path in module.state_dict() if ".lora_" not in path}
            for path, tensor in (*module.named_parameters(), *module.named_buffers()):
                if path in kept:
                    name = f"{network}.{path.replace('.base_layer', '')}"
                    self._base.append((tensor, values[name].to(tensor)))

    def _exchange_base(self) -> None:
        """Exchange the frozen base with a teacher's, where there is one."""
        for here, other in self._base:
            here.data, other.data = other.data, here.data

    def tensors(self) -> dict[str, torch.Tensor]:
        """The trained tensors, their average, a reference that moves or is a teacher, old policy and bank, by name."""
        tensors = {name: p.data for name, p in self.named.items()}
        if self.ema is not None:
            tensors |= {f"{AVERAGE}{name}": slow for name, slow in zip(self.named, self.ema, strict=True)}
        if self._reference is not None and (self._refresh is not None or self._taught):
            tensors |= {f"{REFERENCE}{name}": kept for name, kept in zip(self.named, self._reference, strict=True)}
        if self._old is not None:
            tensors |= {f"{OLD}{name}": kept for name, kept in zip(self.named, self._old, strict=True)}
        for n, own in self.snapshots.kept.items():
            tensors |= {f"{BANK}{n}.{name}": kept for name, kept in zip(self.named, own, strict=True)}
        return tensors

    def adapter_state(self, module: str) -> dict[str, torch.Tensor]:
        """The LoRA tensors of one module under peft's names, as diffusers saves them."""
        return peft.get_peft_model_state_dict(self.modules[module], adapter_name="default")


def _new(lora: LoraConfig, module: torch.nn.Module) -> LoraConfig:
    peft.inject_adapter_in_model(lora, module)
    return lora


class Half(torch.nn.Module):
    """One of the two matrices of a linear layer's adapter: it learns in float32 and computes in its input's precision."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product (..., out) with x (..., in)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), bias)


def _compute_as_their_input(module: torch.nn.Module) -> None:
    """Let the adapters of linear layers compute in the precision of the base.

    peft casts their inputs up to float32 instead, a copy for each adapter, which the graph keeps for its backward pass.
    """
    for layer in module.modules():
        if isinstance(layer, lora_layers.Linear):
            layer.cast_input_dtype_enabled = False
            for halves in (layer.lora_A, layer.lora_B):
                for name, linear in halves.items():
                    halves[name] = Half(cast("torch.nn.Linear", linear))


def _attention_layers(modules: dict[str, torch.nn.Module]) -> tuple[str, ...]:
    """Paths of the linear layers inside modules that call themselves attention; without any, as in LLaDA, whose
    blocks hold them directly, of those that are named as projections."""
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
    """Paths of all linear layers but the head that scores a language model's tokens, as peft's `all-linear`."""
    paths = set()
    for module in modules.values():
        head = module.get_output_embeddings() if isinstance(module, transformers.PreTrainedModel) else None
        paths |= {path for path, m in module.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    return tuple(sorted(paths))


def lora_config(
    rank: int, alpha: float, targets: str | Sequence[str], modules: dict[str, torch.nn.Module]
) -> LoraConfig:
    """A Gaussian-initialised LoRA on the named layers; `auto` takes the attention projections, `all-linear` all.

    Raises:
        InputError: no layer of the modules bears one of the names.
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
    numbers: dict[str, Any] = {"r": rank, "lora_alpha": alpha}  # peft says that alpha is an int, and takes any number
    return peft.LoraConfig(**numbers, target_modules=matched, init_lora_weights="gaussian")


def adapter_size(tensors: Mapping[str, Shape], lora: Lora) -> int:
    """Number of weights in the adapters of a network; with `all-linear`, small embeddings are counted as layers.

    Args:
        tensors: shapes of the network's, by name.
    """
    assert lora.rank is not None  # new adapters have both
    assert lora.targets is not None
    matrices = [(key, s) for key, s in tensors.items() if len(s) == 2]
    if lora.targets == "all-linear":  # a language model's head has the shape of its embedding
        embeddings = {shape for key, shape in matrices if key.endswith(EMBEDDINGS)}
        return sum(lora.rank * sum(s) for key, s in matrices if key.endswith(".weight") and s not in embeddings)
    targets = ATTENTION if lora.targets == "auto" else tuple(lora.targets)
    layers = [s for key, s in matrices if key.endswith(tuple(f"{t}.weight" for t in targets))]
    if not layers:  # `auto` on a model with other names takes all within attention
        within = ("attn", "attention", *PROJECTIONS)
        layers = [s for key, s in matrices if any(word in key for word in within)]
    return sum(lora.rank * sum(shape) for shape in layers)
