"""Comparison of the headers of a model's files with the weights of its class, before anything is loaded.

transformers fills missing weights with random numbers, and diffusers fails on them. Therefore meta tensors with the
names and shapes of the headers are loaded first, by the library's own rules for renamed and tied weights.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.model_files import hub_files
from flowgrpo.training.model_files.folder_files import STEMS
from flowgrpo.training.model_files.hub_files import Shape
from rewards.models.weight_names import SHOWN, describe_missing

if TYPE_CHECKING:
    import accelerate
    import diffusers
    import transformers
    from diffusers.models import modeling_utils as diffusers_models
else:
    accelerate = lazy("accelerate")
    diffusers = lazy("diffusers")
    diffusers_models = lazy("diffusers.models.modeling_utils")
    transformers = lazy("transformers")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences between the weights in files and the weights of a class, by name."""

    missing: frozenset[str]  # weights of the class that the files lack
    surplus: frozenset[str]  # tensors in the files that the class lacks
    mismatched: Mapping[str, tuple[Shape, Shape]]  # the shapes in the files and in the class
    expected: frozenset[str]  # all weights of the class


# Cache of `check` by class, config and shapes: a run checks its model twice, and building a large class takes seconds.
_DIFFERENCES: dict[tuple[Any, ...], Difference] = {}


def is_checked(kind: Any) -> bool:
    """Return whether `check` can compare a class: whether it is a model of diffusers or transformers."""
    return isinstance(kind, type) and issubclass(kind, (diffusers.ModelMixin, transformers.PreTrainedModel))


def stems_of(kind: Any) -> tuple[str, ...]:
    """Return the file name stems that the library of a class reads."""
    return STEMS[_library(kind)]


def _library(kind: type) -> str:
    """Return the library of a checked class; a model of transformers is known without an import of diffusers."""
    return "transformers" if issubclass(kind, transformers.PreTrainedModel) else "diffusers"


def check(
    model: str,
    place: str,
    kind: Any,
    folder: str = "",
    *,
    variant: str | None = None,
    config: Any = None,
    all_used: bool = False,
) -> None:
    """Check that files hold the weights of class `kind`; warn of unused tensors.

    Raises InputError if weights are missing or of another shape, or a layer has weights that the class does not use.

    Args:
        model: name of the model in errors.
        place, folder, variant: see `hub_files.shapes`.
        config: a transformers config; None for the folder's config.json.
        all_used: raise for unused tensors instead of warning.
    """
    stems = stems_of(kind)
    with hub_files.one_sentence(model):
        weights = hub_files.weights_at(place, folder, variant, stems)
        shapes = hub_files.shapes(place, folder, variant, stems)
    if weights is None or not (shapes or (weights.files and weights.has_headers)):
        return  # pickles at the hub have no headers
    with hub_files.one_sentence(model), silent(_library(kind)):
        if _library(kind) == "diffusers":
            own_config = kind.load_config(place, subfolder=folder)
        else:
            own_config = kind.config_class.from_pretrained(place, subfolder=folder) if config is None else config
        key = (kind, repr(own_config), tuple(shapes.items()), weights.sharded)
        if key not in _DIFFERENCES:
            _DIFFERENCES[key] = _compare(kind, own_config, shapes, sharded=weights.sharded)
    difference = _DIFFERENCES[key]
    file = "*.safetensors" if weights.sharded else weights.files[0]
    refuse(difference, kind.__name__, f"{model}: {f'{folder}/{file}'.lstrip('/')}", all_used)


def compare_loaded(info: Mapping[str, Any], network: torch.nn.Module) -> Difference:
    """Return the differences that `from_pretrained` of transformers found: `info` is its `output_loading_info`."""
    return Difference(
        missing=frozenset(info["missing_keys"]),
        surplus=frozenset(info["unexpected_keys"]),
        mismatched={name: (tuple(has), tuple(asked)) for name, has, asked in info["mismatched_keys"]},
        expected=frozenset(network.state_dict()),
    )


def refuse(found: Difference, kind: str, place: str, all_used: bool = False) -> None:
    """Raise InputError if a file at `place` differs from class `kind`; unused tensors only warn unless `all_used`."""
    if found.missing:
        said = describe_missing(found.missing, found.surplus, len(found.expected), kind)
        raise InputError(f"model.path: {place} {said}")
    for name, (has, asked) in sorted(found.mismatched.items()):
        raise InputError(
            f"model.path: {place} holds {name} of shape {list(has)}, where {kind} has {list(asked)} by its config"
        )
    layers = {name.rpartition(".")[0] for name in found.expected} - {""}
    for name in sorted(found.surplus):
        if name.rpartition(".")[0] in layers:
            raise InputError(
                f"model.path: {place} holds {name}, and by its config this layer of {kind} has no such weight"
            )
    if found.surplus:
        first = ", ".join(sorted(found.surplus)[:SHOWN])
        said = f"model.path: {place} holds {len(found.surplus)} tensors that {kind} has no use for ({first})"
        if all_used:
            raise InputError(said)
        warnings.warn(said, stacklevel=3)


def _compare(kind: Any, config: Any, shapes: Mapping[str, Shape], *, sharded: bool) -> Difference:
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with torch.random.fork_rng(devices=[]):
        if _library(kind) == "diffusers":
            return _compare_diffusers(kind, config, tensors, renames=not sharded)
        return _compare_transformers(kind, config, tensors)


def _compare_diffusers(
    kind: Any, written: Mapping[str, Any], tensors: dict[str, torch.Tensor], *, renames: bool
) -> Difference:
    with accelerate.init_empty_weights(), diffusers_models.no_init_weights():
        network = kind.from_config(written)
    if renames:  # `from_pretrained` renames nothing in shards
        network._fix_state_dict_keys_on_load(tensors)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    ignored = kind._keys_to_ignore_on_load_unexpected or ()
    surplus = {name for name in tensors.keys() - expected if not any(re.search(pattern, name) for pattern in ignored)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    difference = Difference(
        missing=frozenset(expected.keys() - tensors),
        surplus=frozenset(surplus),
        mismatched={n: (shape, expected[n]) for n, shape in shapes.items() if n in expected and shape != expected[n]},
        expected=frozenset(expected),
    )
    return _compare_layers(difference, tensors) if "quantization_config" in written else difference


def _compare_transformers(kind: Any, config: Any, tensors: dict[str, torch.Tensor]) -> Difference:
    config = copy(config)
    quantised = vars(config).pop("quantization_config", None)  # so that the class has plain layers
    network, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    difference = compare_loaded(info, network)
    return difference if quantised is None else _compare_layers(difference, tensors)


def _compare_layers(found: Difference, tensors: Mapping[str, torch.Tensor]) -> Difference:
    """Reduce the difference of quantised files to whole layers, since they hold codes and scales under other names."""
    held = {name[:at] for name in tensors for at, letter in enumerate(name) if letter == "."}
    missing = {name for name in found.missing if name.rpartition(".")[0] not in held}
    layers = {name.rpartition(".")[0] for name in found.expected}
    surplus = {name for name in found.surplus if not any(name.startswith(f"{layer}.") for layer in layers)}
    return Difference(missing=frozenset(missing), surplus=frozenset(surplus), mismatched={}, expected=found.expected)


@contextmanager
def silent(library: str) -> Iterator[None]:
    """Return a context without the tables, progress bars and warnings of `diffusers` or `transformers`."""
    log = import_module(f"{library}.utils.logging")
    before = log.get_verbosity()
    with hub_files.without_progress_bars(library), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.set_verbosity_error()
        try:
            yield
        finally:
            log.set_verbosity(before)
