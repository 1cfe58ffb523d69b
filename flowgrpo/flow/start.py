"""What a flow model's training starts from: the adapters of `model.lora.path`, whoever wrote them."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.data import embedded
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Model
from flowgrpo.flow.pipeline import loading
from flowgrpo.flow.pipeline.traits import TRAINED
from flowgrpo.schema.lazy import lazy
from flowgrpo.training import lora_files
from flowgrpo.training.adapters import Adapter, Matrices, check_agrees
from flowgrpo.training.hub import Shape, one_sentence
from flowgrpo.training.lora_files import KEY, LoraFile
from rewards.base import nearest

if TYPE_CHECKING:
    import accelerate
else:
    accelerate = lazy("accelerate")

Layers = Mapping[str, Mapping[str, Shape]]


def adapters(model: Model) -> dict[str, Adapter]:
    """The adapters that training starts from, by network; {} without `model.lora.path`.

    A network that the file has nothing for gets new ones on the same layers, which change nothing at first.

    Raises:
        InputError: there is no such file, or its adapters are not for this model, or not those that the config names.
    """
    if model.lora is None or model.lora.path is None:
        return {}
    paths = {None: model.lora.path} if isinstance(model.lora.path, str) else model.lora.path
    files = {name: lora_files.read(path) for name, path in paths.items()}
    layers = layer_shapes(model.path)
    found: dict[str, Adapter] = {}
    for name, file in files.items():
        if name is not None and name not in layers:
            raise InputError(f"{KEY}: {model.path} has no network {name!r}, {nearest(name, layers)}")
        found |= placed(file, layers if name is None else {name: layers[name]}, model.path)
    check_agrees(model.lora, found.values())
    return {name: found[name] if name in found else _new(name, found, shapes) for name, shapes in layers.items()}


def layer_shapes(path: str) -> dict[str, dict[str, Shape]]:
    """Shapes of the weights of linear and convolutional layers, by the networks that compute the velocity.

    The networks are built from their configurations alone, without weights.
    """
    shapes = {}
    for name, written in loading.index_of(path).items():
        network_class = loading.component_class(written) if name.startswith(TRAINED) else None
        if network_class is None:
            continue
        with one_sentence(path):
            config = network_class.load_config(embedded.place_of(path), subfolder=name)
            with accelerate.init_empty_weights():
                network = network_class.from_config(config)
        adaptable = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
        shapes[name] = {at: tuple(m.weight.shape) for at, m in network.named_modules() if isinstance(m, adaptable)}
    return shapes


def placed(file: LoraFile, layers: Layers, path: str) -> dict[str, Adapter]:
    """The adapters of a file by network, by names as they are or as the pipeline's own class translates them.

    Args:
        layers: of the model at `path`, see `layer_shapes`.

    Raises:
        InputError: they are not for this model.
    """
    try:
        return lora_files.placed(file, lora_files.layers_of(file), layers, path)
    except InputError as error:
        refused = error
    pipeline = loading.pipeline_class(path)
    if not hasattr(pipeline, "lora_state_dict"):
        raise refused
    for spelled in (_for_translation(file), _respelled(file)):
        translated = _translated(pipeline, spelled.tensors)
        if not translated:  # some drop what they do not know
            continue
        try:
            renamed = replace(spelled, tensors=translated)
            return lora_files.placed(renamed, lora_files.layers_of(renamed), layers, path)
        except InputError as error:
            refused = refused if translated.keys() == spelled.tensors.keys() else error
    raise refused


def _for_translation(file: LoraFile) -> LoraFile:
    """A file whose options hold for names to come; none of them beside alphas of its own, which a class multiplies in."""
    if any(key.endswith(".alpha") for key in file.tensors):
        return replace(file, options={})
    plain = lora_files.without_patterns(file)
    if len(plain.options) != 1:
        return plain
    (options,) = plain.options.values()
    return replace(plain, options={"": options})


def _respelled(file: LoraFile) -> LoraFile:
    """A file as ComfyUI and kohya would write it, which is all that some classes translate."""
    alphas = lora_files.alphas(file) if file.options else {}
    tensors = {}
    for key, tensor in (alphas | dict(file.tensors)).items():
        name = re.sub(r"^base_model\.model\.", "diffusion_model.", key)
        tensors[name.replace(".lora_A.", ".lora_down.").replace(".lora_B.", ".lora_up.")] = tensor
    return replace(file, tensors=tensors, options={})


def _translated(pipeline: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Tensors under diffusers' names, by the pipeline's own class; None where it does not know the names."""
    with_alphas = "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters
    with _silent():
        try:
            found = pipeline.lora_state_dict(dict(tensors), **({"return_alphas": True} if with_alphas else {}))
        except Exception:  # whatever names of others raise in there
            return None
    state, alphas = found if with_alphas else (found, None)
    state = {key: t for key, t in state.items() if not key.startswith(lora_files.TEXT_ENCODERS)}
    return state | {key: torch.as_tensor(alpha) for key, alpha in (alphas or {}).items()}


@contextmanager
def _silent():
    before = loading.diffusers.utils.logging.get_verbosity()
    loading.diffusers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            loading.diffusers.utils.logging.set_verbosity(before)


def _new(name: str, found: Mapping[str, Adapter], shapes: Mapping[str, Shape]) -> Adapter:
    """Adapters that add nothing, on the layers that another network has some on."""
    ((other, adapter), *_) = found.items()
    generator = torch.Generator().manual_seed(0)
    layers = {}
    for path, layer in adapter.layers.items():
        if shapes.get(path) == (len(layer.up), *layer.down.shape[1:]):
            down = torch.randn(layer.down.shape, generator=generator) / layer.rank
            layers[path] = Matrices(down=down, up=torch.zeros_like(layer.up), bias=None, alpha=layer.alpha)
    if not layers:
        raise InputError(
            f"{KEY}: it has adapters for {other} alone, and {name} has none of the layers that they are for"
        )
    return Adapter(layers, adapter.rslora)
