"""Mapping of a LoRA file's tensors to layers of networks. A tensor without a layer is an error, never ignored.

A shift is a full-rank change of a parameter, which some files hold beside the low-rank matrices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from flowgrpo.errors import InputError
from flowgrpo.training.lora.lora_files import KEY, SHIFT, LoraFile
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.weights.lora_adapters import Adapter, Matrices, alpha_in

MATRIX = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?:\.default)?\.(weight|bias)")
ROLES = {"A.weight": "down", "down.weight": "down", "B.weight": "up", "up.weight": "up", "B.bias": "bias"}
SHIFTED = {"diff": "weight", "w_norm": "weight", "diff_b": "bias", "b_norm": "bias", "diff_m": "modulation"}
DOTTED = ("base_model.model.", "diffusion_model.", "transformer.", "")  # prefixes of names: peft, ComfyUI, diffusers
FLAT = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")  # prefixes of names with _ for each dot


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The weight shapes of a network."""

    kind: str  # class name
    layers: Mapping[str, Shape]  # weight shapes of linear and convolutional layers, by path
    parameters: Mapping[str, Shape]  # shapes of all parameters, by path

    @classmethod
    def of(cls, network: torch.nn.Module) -> Outline:
        """Return the outline of a network, which may lie on the meta device."""
        adaptable = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
        return cls(
            kind=type(network).__name__,
            layers={path: tuple(m.weight.shape) for path, m in network.named_modules() if isinstance(m, adaptable)},
            parameters={path: tuple(p.shape) for path, p in network.named_parameters(remove_duplicate=False)},
        )


class Target(NamedTuple):
    """The layers, or the parameters, of a network that a name in a LoRA file stands for."""

    network: str
    parts: tuple[str, ...]  # paths; several if the file's layer is fused from them
    swapped: bool = False  # whether the file has the two halves of the output in the other order


Table = Mapping[str, Target]


class Index:
    """Map from names in LoRA files to layers and parameters of networks. Names of the first network need no prefix."""

    def __init__(self, layers: Mapping[str, Table], parameters: Mapping[str, Table]):
        self._layers = _add_prefixes(layers, dot_before_last=False)
        self._parameters = _add_prefixes(parameters, dot_before_last=True)

    def layer(self, name: str) -> Target | None:
        """Return the target of a layer's name in a file, or None."""
        return _look_up(self._layers, name)

    def parameters(self, name: str) -> Iterator[Target]:
        """Yield the possible targets of a shift `LAYER.KIND`: parameters `LAYER.KIND`, `LAYER`, and KIND of layer LAYER."""
        layer, _, kind = name.rpartition(".")
        yield from filter(None, (_look_up(self._parameters, name), _look_up(self._parameters, layer)))
        if (target := self.layer(layer)) is not None:
            yield target._replace(parts=tuple(f"{part}.{kind}" for part in target.parts))


def _add_prefixes(tables: Mapping[str, Table], *, dot_before_last: bool) -> list[tuple[str, Table]]:
    """Return pairs of a prefix and the table of the names that may follow it in a file.

    Flat names have _ in place of dots. With `dot_before_last`, they may keep the last dot.
    """
    first = next(iter(tables.values()))
    flat = {name.replace(".", "_"): target for name, target in first.items()}
    if dot_before_last:
        parts = ((name.rpartition("."), target) for name, target in first.items())
        flat |= {f"{layer.replace('.', '_')}.{last}": target for (layer, _, last), target in parts}
    of_networks = [(f"{network}.", table) for network, table in tables.items()]
    return of_networks + [(prefix, first) for prefix in DOTTED] + [(prefix, flat) for prefix in FLAT]


def _look_up(tables: Iterable[tuple[str, Table]], name: str) -> Target | None:
    rests = ((name.removeprefix(prefix), table) for prefix, table in tables if name.startswith(prefix))
    return next((table[rest] for rest, table in rests if rest in table), None)


def layers_of(file: LoraFile) -> dict[str, Matrices]:
    """Return a file's matrices and bias shifts by layer name. Raises InputError if they do not form a LoRA."""
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    alphas: dict[str, float] = {}
    for key, tensor in file.tensors.items():
        matrix = MATRIX.fullmatch(key)
        role = ROLES.get(f"{matrix[2].removeprefix('lora')[1:]}.{matrix[3]}") if matrix else None
        if matrix is not None and role is not None:
            if role in found[matrix[1]]:
                raise InputError(f"{KEY}: {file.place} has two adapters for {matrix[1]}, {key} is of one of them")
            if not tensor.is_floating_point():
                raise InputError(f"{KEY}: {file.place} holds {key} as {str(tensor.dtype).removeprefix('torch.')}")
            found[matrix[1]][role] = tensor
        elif key.endswith(".alpha") and tensor.numel() == 1:
            alphas[key.removesuffix(".alpha")] = float(tensor)
        elif not SHIFT.fullmatch(key):
            raise InputError(f"{KEY}: {file.place} holds {key}, which is no matrix of a LoRA")
    for name in alphas.keys() - found.keys():
        raise InputError(f"{KEY}: {file.place} holds {name}.alpha, and no matrices that it scales")
    return {name: _matrices(file, name, roles, alphas.get(name)) for name, roles in found.items()}


def _matrices(file: LoraFile, name: str, roles: Mapping[str, torch.Tensor], alpha: float | None) -> Matrices:
    """Return the adapter of one layer. If `alpha` is None, it is taken from peft's options."""
    if not roles.keys() >= {"down", "up"}:
        raise InputError(f"{KEY}: {file.place} has one matrix of the two for {name}")
    down, up, bias = roles["down"], roles["up"], roles.get("bias")
    if down.ndim < 2 or up.ndim < 2 or up.shape[1] != len(down):
        raise InputError(f"{KEY}: {file.place} has matrices of different ranks for {name}")
    if alpha is not None and alpha <= 0:
        raise InputError(f"{KEY}: {file.place} has an alpha of {alpha:g} for {name}, it must be above 0")
    if up.shape[2:].numel() != 1:
        raise InputError(f"{KEY}: {file.place} has a second matrix for {name} that is no product but a convolution")
    shift = file.tensors.get(f"{name}.diff_b")
    for added in (bias, shift):
        if added is not None and added.shape != (len(up),):
            raise InputError(
                f"{KEY}: {file.place} has a bias of shape {list(added.shape)} for {name}, whose output is {len(up)} wide"
            )
    up = up.reshape(len(up), len(down), *[1] * (down.ndim - 2))  # some files hold a convolution's `up` as a matrix
    options, inside = options_of(file, name)
    try:
        alpha = alpha_in(options, inside, len(down)) if alpha is None else alpha
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise InputError(f"{KEY}: {file.place} has options that peft does not write ({error})") from error
    if shift is not None:
        scale = alpha / (len(down) ** 0.5 if options.get("use_rslora") is True else len(down))
        bias = shift / scale if bias is None else bias + shift / scale
    return Matrices(down=down, up=up, bias=bias, alpha=alpha)


def shifts_of(file: LoraFile) -> dict[str, torch.Tensor]:
    """Return a file's shifts by `LAYER.weight`, `LAYER.bias` or `LAYER.modulation`, except those in `layers_of`."""
    found = {}
    layers = {match[1] for key in file.tensors if (match := MATRIX.fullmatch(key))}
    for key, tensor in file.tensors.items():
        match = SHIFT.fullmatch(key)
        if match and not (match[2] == "diff_b" and match[1] in layers):
            name = f"{match[1]}.{SHIFTED[match[2]]}"
            if name in found:
                raise InputError(f"{KEY}: {file.place} shifts {name} twice, {key} is one of the shifts")
            found[name] = tensor
    return found


def options_of(file: LoraFile, name: str) -> tuple[Mapping[str, Any], str]:
    """Return peft's options for a name in a file, and the name that the options' patterns are matched with."""
    network, _, rest = name.partition(".")
    return (file.options[network], rest) if network in file.options else (file.options.get("", {}), name)


def unknown(file: LoraFile, index: Index) -> list[str]:
    """Return the layer names of a file that have no target, sorted."""
    return sorted(name for name in layers_of(file) if index.layer(name) is None)


def assign_adapters(file: LoraFile, index: Index, networks: Mapping[str, Outline], model: str) -> dict[str, Adapter]:
    """Return a file's adapters by network. `model` is the model's name in errors.

    Raises InputError if a name has no target, a shape differs, or two names have the same target.
    """
    layers: dict[str, dict[str, Matrices]] = {name: {} for name in networks}
    shifts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in networks}
    rslora_networks: set[str] = set()
    for name, matrices in layers_of(file).items():
        target = index.layer(name)
        if target is None:
            raise InputError(f"{KEY}: {file.place} has an adapter for {name}, and {model} has no such layer")
        outline = networks[target.network]
        shapes = [outline.layers[part] for part in target.parts]
        written, has = (len(matrices.up), *matrices.down.shape[1:]), (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if written != has:
            raise InputError(
                f"{KEY}: {file.place} is of another model, its adapter of {name} is for a weight of "
                f"{' x '.join(map(str, written))}, in {model} it has {' x '.join(map(str, has))}"
            )
        rslora = options_of(file, name)[0].get("use_rslora") is True
        own = dict(_split(matrices, target, [shape[0] for shape in shapes], rslora))
        _add(file, name, layers[target.network], own)
        if rslora:
            rslora_networks.add(target.network)
    for name, shift in shifts_of(file).items():
        network, own = _split_shift(name, shift, index, networks)
        if not own:
            raise InputError(f"{KEY}: {file.place} shifts {name}, and {model} has no such parameter of that shape")
        _add(file, name, shifts[network], own)
    return {
        name: Adapter(own, name in rslora_networks, shifts[name]) for name, own in layers.items() if own or shifts[name]
    }


def refuse_shifts_alone(found: Iterable[Adapter]) -> None:
    """Raise InputError if the adapters have only shifts and no matrices, so that there is nothing to train."""
    found = list(found)
    if not any(adapter.layers for adapter in found):
        first = min(path for adapter in found for path in adapter.shifts)
        raise InputError(
            f"{KEY}: it shifts {first} and has no matrices to train; set model.merge to it, and lora to null"
        )


def _add(file: LoraFile, name: str, found: dict[str, Any], own: Mapping[str, Any]) -> None:
    for path in own:
        if path in found:
            raise InputError(f"{KEY}: {file.place} has two adapters for {path}, {name} is one of them")
    found.update(own)


def _split(matrices: Matrices, target: Target, sizes: list[int], rslora: bool) -> Iterator[tuple[str, Matrices]]:
    """Yield each target layer with its matrices. If the file fuses several layers, each keeps only ranks that act on it."""
    if target.swapped:
        bias = None if matrices.bias is None else _swap_halves(matrices.bias)
        matrices = replace(matrices, up=_swap_halves(matrices.up), bias=bias)
    if len(sizes) == 1:
        yield target.parts[0], matrices
        return
    ups = matrices.up.split(sizes)
    biases = [None] * len(sizes) if matrices.bias is None else matrices.bias.split(sizes)
    untrained = not matrices.up.any()
    for part, up, bias in zip(target.parts, ups, biases, strict=True):
        acts = (up != 0).any(0) | untrained
        if not acts.any() and (bias is None or not bias.any()):
            continue  # this part has no adapter
        acts = acts if acts.any() else torch.ones_like(acts)
        less = int(acts.sum()) / matrices.rank
        alpha = matrices.alpha * (less**0.5 if rslora else less)  # keeps the scale
        yield part, Matrices(down=matrices.down[acts], up=up[:, acts], bias=bias, alpha=alpha)


def _swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def _split_shift(
    name: str, shift: torch.Tensor, index: Index, networks: Mapping[str, Outline]
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the network that a shift changes, and the change by parameter; ("", {}) if none has its shape."""
    for target in index.parameters(name):
        parameters = networks[target.network].parameters
        shapes = [parameters[part] for part in target.parts if part in parameters]
        if len(shapes) < len(target.parts) or not shift.ndim or sum(shape[0] for shape in shapes) != len(shift):
            continue
        whole = _swap_halves(shift) if target.swapped else shift
        own = dict(zip(target.parts, whole.split([shape[0] for shape in shapes]), strict=True))
        if all(tensor.shape == shape for tensor, shape in zip(own.values(), shapes, strict=True)):
            return target.network, own
    return "", {}


def names_in(network: str, paths: Iterable[str]) -> dict[str, Target]:
    """Return a table for `Index` in which each layer path of a network stands for itself."""
    return {path: Target(network, (path,)) for path in paths}


def without_patterns(file: LoraFile) -> LoraFile:
    """Scale the matrices by the alphas of peft's `alpha_pattern`, and drop that option.

    The option's patterns would not match the names of other formats. Raises as `layers_of`.
    """
    options = {
        name: {key: value for key, value in own.items() if key != "alpha_pattern"} for name, own in file.options.items()
    }
    plain = replace(file, options=options)
    if options == file.options:
        return plain
    before, after = layers_of(file), layers_of(plain)
    tensors = dict(file.tensors)
    for key, tensor in file.tensors.items():
        matrix = MATRIX.fullmatch(key)
        if matrix and matrix[2].endswith(("B", "up")):
            tensors[key] = tensor * (before[matrix[1]].alpha / after[matrix[1]].alpha)
    return replace(plain, tensors=tensors)


def alphas(file: LoraFile) -> dict[str, torch.Tensor]:
    """Return alphas by `LAYER.alpha`, for kohya's scale alpha / rank, never alpha / sqrt(rank). Raises as `layers_of`."""
    found = {}
    for name, matrices in layers_of(file).items():
        root = options_of(file, name)[0].get("use_rslora") is True
        found[f"{name}.alpha"] = torch.tensor(matrices.alpha * (matrices.rank**0.5 if root else 1.0))
    return found
