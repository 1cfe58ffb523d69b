"""Adapters from which training starts: the LoRA of `model.lora.path`, in any known format."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.data import embedded
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config, Model
from flowgrpo.flow.model.layer_names import NAMES, Names
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.networks.traits import TRAINED
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.lora import LoraPath
from flowgrpo.training.lora import lora_files, lora_layers
from flowgrpo.training.lora.lora_files import KEY, LoraFile
from flowgrpo.training.lora.lora_layers import Index, Outline, Target
from flowgrpo.training.model_files.hub_files import one_sentence
from flowgrpo.training.weights import sharding
from flowgrpo.training.weights.lora_adapters import Adapter, Matrices, check_agrees
from rewards.base import nearest

if TYPE_CHECKING:
    import accelerate
    from diffusers import DiffusionPipeline, ModelMixin
else:
    accelerate = lazy("accelerate")


def adapters(model: Model) -> dict[str, Adapter]:
    """Return the adapters of `model.lora.path` or `model.merge`, by network; {} without either.

    A network without adapters in `model.lora.path` gets new ones (up = 0) on the layers of another network's adapters;
    this leaves its output unchanged. Raise InputError if there is no such file, or its adapters do not fit the model or
    the config.
    """
    if model.merge is not None:
        with lora_files.named("model.merge"):
            return read(model.merge, outlines(model.path), model.path)
    if model.lora is None or model.lora.path is None:
        return {}
    networks = outlines(model.path)
    found = read(model.lora.path, networks, model.path)
    lora_layers.refuse_shifts_alone(found.values())
    check_agrees(model.lora, found.values())
    return {name: _complete(name, found, each) for name, each in networks.items()}


def check_switched(found: Mapping[str, Adapter], config: Config) -> None:
    """Raise InputError if a run must switch adapters off, but they shift parameters, which cannot be switched off."""
    if config.eval.adapter_steps is not None:
        refuse_shifts(found, "eval.adapter_steps")
    if sharding.applies(config.run.sharding) and config.algorithm.reference == "base":
        refuse_shifts(found, "algorithm.objective.kl.reference=base with run.sharding")


def refuse_shifts(found: Mapping[str, Adapter], key: str) -> None:
    """Raise InputError if an adapter shifts parameters; `key` is the option that would switch it off."""
    for network, adapter in found.items():
        if adapter.shifts:
            raise InputError(
                f"{key}: the LoRA shifts {network}.{min(adapter.shifts)}, which cannot be switched off; take a LoRA "
                "of matrices alone"
            )


def read(path: LoraPath, networks: Mapping[str, Outline], model: str) -> dict[str, Adapter]:
    """Return the adapters of a file, or of one file per network, by network; `networks` as `outlines` returns them.

    Raise InputError if there is no such file, or its adapters are not for this `model`.
    """
    found: dict[str, Adapter] = {}
    for name, each in ({None: path} if isinstance(path, str) else path).items():
        file = lora_files.read(each)
        if name is not None and name not in networks:
            raise InputError(f"{KEY}: {model} has no network {name!r}, {nearest(name, networks)}")
        found |= assign_adapters(file, networks if name is None else {name: networks[name]}, model)
    return found


def load_lora(pipe: DiffusionPipeline, path: str | Path, lora: LoraPath) -> None:
    """Put a LoRA, given as in `model.lora.path`, into the networks of the stock pipeline of the model at `path`.

    Raise InputError if there is no such file, or its adapters are not for this model.
    """
    for name, adapter in read(lora, outlines(str(path)), str(path)).items():
        adapter.inject(getattr(pipe, name))


def outlines(path: str) -> dict[str, Outline]:
    """Return the outlines (layers and shapes) of a model's velocity networks by name, from their configs alone."""
    networks = {}
    for name, written in load.index_of(path).items():
        kind: type[ModelMixin] | None = load.component_class(written) if name.startswith(TRAINED) else None
        if kind is not None:
            with one_sentence(path):
                config = kind.load_config(embedded.place_of(path), subfolder=name)
                with accelerate.init_empty_weights():
                    networks[name] = Outline.of(kind.from_config(config))
    return networks


def assign_adapters(file: LoraFile, networks: Mapping[str, Outline], path: str) -> dict[str, Adapter]:
    """Return a file's adapters by network; layers are found by diffusers' names, `layer_names`, or the pipeline class.

    A file with names in neither of the first two is translated by the pipeline class (`lora_state_dict`), if it can. Raise
    InputError if the adapters are not for the model at `path`.
    """
    index = _index(networks)
    unknown = lora_layers.unknown(file, index)
    pipeline = load.pipeline_class(path) if unknown else None
    if not hasattr(pipeline, "lora_state_dict"):
        return lora_layers.assign_adapters(file, index, networks, path)
    refused = InputError(f"{KEY}: {file.place} has an adapter for {unknown[0]}, and {path} has no such layer")
    for spelled in (_simplify_options(file), _respell(file)):
        translated = _translate(pipeline, spelled)
        if not translated or translated.keys() == spelled.tensors.keys():  # unknown names are left unchanged
            continue
        try:
            return lora_layers.assign_adapters(replace(spelled, tensors=translated), index, networks, path)
        except InputError as error:
            refused = error
    raise refused


def _index(networks: Mapping[str, Outline]) -> Index:
    layers: dict[str, dict[str, Target]] = {}
    parameters: dict[str, dict[str, Target]] = {}
    for name, outline in networks.items():
        names = NAMES.get(outline.kind, Names())
        others = {
            other: Target(name, parts, names.swaps(other, outline.layers[parts[0]]))
            for other, parts in names.read_layers(outline.layers).items()
        }
        layers[name] = others | lora_layers.names_in(name, outline.layers)
        others = {other: Target(name, parts) for other, parts in names.read_parameters(outline.parameters).items()}
        parameters[name] = others | lora_layers.names_in(name, outline.parameters)
    return Index(layers, parameters)


def _simplify_options(file: LoraFile) -> LoraFile:
    """Return the file without LoRA options if it has alphas; else a single set of options becomes that of all names."""
    if any(key.endswith(".alpha") for key in file.tensors):
        return replace(file, options={})
    plain = lora_layers.without_patterns(file)
    if len(plain.options) != 1:
        return plain
    (options,) = plain.options.values()
    return replace(plain, options={"": options})


def _respell(file: LoraFile) -> LoraFile:
    """Return the file with names as ComfyUI and kohya spell them; some pipeline classes translate only these."""
    alphas = lora_layers.alphas(file) if file.options else {}
    tensors = {}
    for key, tensor in (alphas | dict(file.tensors)).items():
        name = re.sub(r"^base_model\.model\.", "diffusion_model.", key)
        tensors[name.replace(".lora_A.", ".lora_down.").replace(".lora_B.", ".lora_up.")] = tensor
    return replace(file, tensors=tensors, options={})


def _translate(pipeline: Any, file: LoraFile) -> dict[str, torch.Tensor] | None:
    """Return a file's tensors by diffusers' names, as the pipeline class translates them; None if it cannot."""
    given = {
        key: tensor if key.endswith(".alpha") else tensor.detach().requires_grad_()
        for key, tensor in file.tensors.items()
        if not lora_files.SHIFT.fullmatch(key)
    }
    with_alphas = "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters
    with _without_warnings():
        try:
            passed = {key: tensor * 1 for key, tensor in given.items()}  # some classes change tensors in place
            translated = pipeline.lora_state_dict(passed, **({"return_alphas": True} if with_alphas else {}))
        except Exception:  # unknown names may raise any error
            return None
    state, alphas = translated if with_alphas else (translated, None)
    _check_used(file, given, state)
    state = {key: t.detach() for key, t in state.items() if not key.startswith(lora_files.TEXT_ENCODERS)}
    shifts = {key: tensor for key, tensor in file.tensors.items() if lora_files.SHIFT.fullmatch(key)}
    return state | shifts | {key: torch.as_tensor(alpha) for key, alpha in (alphas or {}).items()}


def _check_used(file: LoraFile, given: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError if the translation ignores a tensor of `given`, so that the sum of `state` has no gradient for it."""
    learning = {key: tensor for key, tensor in given.items() if tensor.requires_grad}
    total = sum(tensor.sum() for tensor in state.values() if torch.is_tensor(tensor) and tensor.requires_grad)
    if not torch.is_tensor(total):
        return
    gradients = torch.autograd.grad(total, list(learning.values()), allow_unused=True)
    for key, gradient in zip(learning, gradients, strict=True):
        if gradient is None or not gradient.any():
            raise InputError(f"{KEY}: {file.place} holds {key}, which diffusers' translation of such names leaves out")


@contextmanager
def _without_warnings():
    before = load.diffusers.utils.logging.get_verbosity()
    load.diffusers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            load.diffusers.utils.logging.set_verbosity(before)


def _complete(name: str, found: Mapping[str, Adapter], outline: Outline) -> Adapter:
    """Return a network's adapters; if it has none, new ones (up = 0) on the layers of another network's adapters."""
    own = found.get(name, Adapter({}))
    if own.layers:
        return own
    other, adapter = next((each for each in found.items() if each[1].layers), (name, own))
    generator = torch.Generator().manual_seed(0)
    layers = {}
    for path, layer in adapter.layers.items():
        if outline.layers.get(path) == (len(layer.up), *layer.down.shape[1:]):
            down = torch.randn(layer.down.shape, generator=generator) / layer.rank
            layers[path] = Matrices(down=down, up=torch.zeros_like(layer.up), bias=None, alpha=layer.alpha)
    if not layers:
        raise InputError(
            f"{KEY}: it has adapters for {other} alone, and {name} has none of the layers that they are for"
        )
    return replace(own, layers=layers, rslora=adapter.rslora)
