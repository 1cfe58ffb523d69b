"""What the tensors of a LoRA file mean, and the layers of networks that they are for. No tensor is left out in silence."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from flowgrpo.errors import InputError
from flowgrpo.training.checkpoints.lora_files import KEY, SHIFT, LoraFile
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.weights.lora_adapters import Adapter, Matrices, alpha_in

MATRIX = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?:\.default)?\.(weight|bias)")
ROLES = {"A.weight": "down", "down.weight": "down", "B.weight": "up", "up.weight": "up", "B.bias": "bias"}
SHIFTED = {"diff": "weight", "w_norm": "weight", "diff_b": "bias", "b_norm": "bias", "diff_m": "modulation"}
DOTTED = ("base_model.model.", "diffusion_model.", "transformer.", "")  # before names, of peft, ComfyUI and diffusers
FLAT = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")  # before names with _ for each dot


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A network's shapes.

    Attributes:
        kind: the name of its class.
        layers: of the weights of its linear and convolutional layers, by path.
        parameters: of all its parameters, by path.
    """

    kind: str
    layers: Mapping[str, Shape]
    parameters: Mapping[str, Shape]

    @classmethod
    def of(cls, network: torch.nn.Module) -> Outline:
        """The outline of a network, which may be on the device meta."""
        adaptable = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
        return cls(
            kind=type(network).__name__,
            layers={path: tuple(m.weight.shape) for path, m in network.named_modules() if isinstance(m, adaptable)},
            parameters={path: tuple(p.shape) for path, p in network.named_parameters(remove_duplicate=False)},
        )


class Target(NamedTuple):
    """What a name in a file means: layers or a parameter of a network; `swapped` where halves are in the other order."""

    network: str
    parts: tuple[str, ...]
    swapped: bool = False


Table = Mapping[str, Target]


class Index:
    """The meaning of names in a file.

    Args:
        layers: by network, what the names of layers mean there; those of the first may stand without its name before them.
        parameters: the same of parameters.
    """

    def __init__(self, layers: Mapping[str, Table], parameters: Mapping[str, Table]):
        self._layers, self._parameters = _prefixed(layers, _flat), _prefixed(parameters, _flat, _flat_layer)

    def layer(self, name: str) -> Target | None:
        """What the name of a layer means; None if no layer is called so."""
        return _found(self._layers, name)

    def parameters(self, name: str) -> Iterator[Target]:
        """Yield what the name of a shift may mean: a parameter, one of no layer, or the weight or bias of a layer."""
        layer, _, own = name.rpartition(".")
        yield from filter(None, (_found(self._parameters, name), _found(self._parameters, layer)))
        if (target := self.layer(layer)) is not None:
            yield target._replace(parts=tuple(f"{part}.{own}" for part in target.parts))


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _flat_layer(path: str) -> str:
    layer, _, own = path.rpartition(".")
    return f"{_flat(layer)}.{own}"


def _prefixed(tables: Mapping[str, Table], *flatten: Callable[[str], str]) -> list[tuple[str, Table]]:
    """Each table, and what stands before its names in a file."""
    first = next(iter(tables.values()))
    flat = {each(name): target for each in flatten for name, target in first.items()}
    own = [(f"{network}.", table) for network, table in tables.items()]
    return own + [(prefix, first) for prefix in DOTTED] + [(prefix, flat) for prefix in FLAT]


def _found(tables: Iterable[tuple[str, Table]], name: str) -> Target | None:
    rests = ((name.removeprefix(prefix), table) for prefix, table in tables if name.startswith(prefix))
    return next((table[rest] for rest, table in rests if rest in table), None)


def layers_of(file: LoraFile) -> dict[str, Matrices]:
    """The matrices of a file by the names of layers in it; a shift of a bias beside them is theirs.

    Raises:
        InputError: the file holds something else, or half of an adapter.
    """
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
    """The adapter of one layer; its alpha is the file's own, or that of peft's options."""
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
    up = up.reshape(len(up), len(down), *[1] * (down.ndim - 2))  # of convolutions some are written as matrices
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
    """What a file adds to further parameters, by their names in it: of a layer, and `weight`, `bias` or `modulation`."""
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
    """peft's options for a name in a file, and the name as their patterns mean it."""
    network, _, rest = name.partition(".")
    return (file.options[network], rest) if network in file.options else (file.options.get("", {}), name)


def unknown(file: LoraFile, index: Index) -> list[str]:
    """The names in a file of layers that mean nothing, in order."""
    return sorted(name for name in layers_of(file) if index.layer(name) is None)


def placed(file: LoraFile, index: Index, networks: Mapping[str, Outline], model: str) -> dict[str, Adapter]:
    """The adapters by network, as far as a file has any.

    Args:
        model: what the networks are called in errors.

    Raises:
        InputError: a name means nothing, a shape is another, or two names mean one layer.
    """
    layers: dict[str, dict[str, Matrices]] = {name: {} for name in networks}
    shifts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in networks}
    over_root: set[str] = set()  # networks whose alphas are over the root of the rank
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
        own = dict(_parts(matrices, target, [shape[0] for shape in shapes], rslora))
        _add(file, name, layers[target.network], own)
        over_root |= {target.network} if rslora else set()
    for name, shift in shifts_of(file).items():
        network, own = _shifted(name, shift, index, networks)
        if not own:
            raise InputError(f"{KEY}: {file.place} shifts {name}, and {model} has no such parameter of that shape")
        _add(file, name, shifts[network], own)
    return {name: Adapter(own, name in over_root, shifts[name]) for name, own in layers.items() if own or shifts[name]}


def refuse_shifts_alone(found: Iterable[Adapter]) -> None:
    """Refuse adapters none of which has matrices, so that there is nothing to train.

    Raises:
        InputError: names the first shift.
    """
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


def _parts(matrices: Matrices, target: Target, sizes: list[int], rslora: bool) -> Iterator[tuple[str, Matrices]]:
    """Yield the layers of an adapter with the rows of each. Of a layer in parts each takes what of the rank acts on it."""
    if target.swapped:
        bias = None if matrices.bias is None else _swapped(matrices.bias)
        matrices = replace(matrices, up=_swapped(matrices.up), bias=bias)
    if len(sizes) == 1:
        yield target.parts[0], matrices
        return
    ups = matrices.up.split(sizes)
    biases = [None] * len(sizes) if matrices.bias is None else matrices.bias.split(sizes)
    new = not matrices.up.any()  # which has learnt nothing yet
    for part, up, bias in zip(target.parts, ups, biases, strict=True):
        acts = (up != 0).any(0) | new
        if not acts.any() and (bias is None or not bias.any()):
            continue  # this part has no adapter
        acts = acts if acts.any() else torch.ones_like(acts)
        less = int(acts.sum()) / matrices.rank
        alpha = matrices.alpha * (less**0.5 if rslora else less)  # so that the scale stays
        yield part, Matrices(down=matrices.down[acts], up=up[:, acts], bias=bias, alpha=alpha)


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def _shifted(
    name: str, shift: torch.Tensor, index: Index, networks: Mapping[str, Outline]
) -> tuple[str, dict[str, torch.Tensor]]:
    """The network of a shift, and what it adds to each parameter there; {} where the model has none of its shape."""
    for target in index.parameters(name):
        has = networks[target.network].parameters
        shapes = [has[part] for part in target.parts if part in has]
        if len(shapes) < len(target.parts) or not shift.ndim or sum(shape[0] for shape in shapes) != len(shift):
            continue
        whole = _swapped(shift) if target.swapped else shift
        own = dict(zip(target.parts, whole.split([shape[0] for shape in shapes]), strict=True))
        if all(tensor.shape == shape for tensor, shape in zip(own.values(), shapes, strict=True)):
            return target.network, own
    return "", {}


def names_in(network: str, paths: Iterable[str]) -> dict[str, Target]:
    """The table of a network's own names, for `Index`."""
    return {path: Target(network, (path,)) for path in paths}


def without_patterns(file: LoraFile) -> LoraFile:
    """The same adapters without `alpha_pattern`, which would not match other names: those alphas go into the matrices.

    Raises:
        InputError: there are such patterns, and the file holds something else than adapters.
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
    """The alpha of each adapter of a file as kohya writes it, which is over the rank and never over its root.

    Raises:
        InputError: the file holds something else than adapters.
    """
    found = {}
    for name, matrices in layers_of(file).items():
        root = options_of(file, name)[0].get("use_rslora") is True
        found[f"{name}.alpha"] = torch.tensor(matrices.alpha * (matrices.rank**0.5 if root else 1.0))
    return found
