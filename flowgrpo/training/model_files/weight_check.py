"""Holds the headers of a model's files against the weights of its class, before anything is loaded.

transformers fills missing weights with random numbers, and diffusers fails on them. So the names and shapes in the headers
are loaded first, as tensors on the device meta, by the library's own rules for renamed and tied weights. What they then miss
is refused.
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
from rewards.models.weight_names import SHOWN, lacking

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
    """How files differ from a class.

    Attributes:
        missing: names of weights that the class has and the files do not.
        surplus: names that the files have and the class does not.
        mismatched: of names that both have, the shape in the files and that of the class.
        expected: names of all weights of the class.
    """

    missing: frozenset[str]
    surplus: frozenset[str]
    mismatched: Mapping[str, tuple[Shape, Shape]]
    expected: frozenset[str]


def is_checked(kind: Any) -> bool:
    """Whether a class is of those whose files can be held against it: models of diffusers and of transformers."""
    return isinstance(kind, type) and issubclass(kind, (diffusers.ModelMixin, transformers.PreTrainedModel))


def stems_of(kind: Any) -> tuple[str, ...]:
    """How the names begin of the files that the library of a class opens."""
    return STEMS["diffusers" if issubclass(kind, diffusers.ModelMixin) else "transformers"]


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
    """Refuse files that do not hold the weights of a class; warn of tensors that it has no use for.

    Args:
        model: what the user calls it.
        place: its local folder or hub id.
        kind: the class that the files are of.
        folder: of the component, below the place.
        variant: of the files that are read, where there are any of it.
        config: of transformers, if it is not the config.json of the folder.
        all_used: whether tensors that the class has no use for are refused, too.

    Raises:
        InputError: weights are missing or have another shape, or the files hold more of a layer than the class computes.
    """
    stems = stems_of(kind)
    with hub_files.one_sentence(model):
        weights, shapes = (
            hub_files.weights_at(place, folder, variant, stems),
            hub_files.shapes(place, folder, variant, stems),
        )
    if weights is None or not (shapes or (weights.files and weights.has_headers)):
        return  # no header that could be read alone
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with hub_files.one_sentence(model), silent(), torch.random.fork_rng(devices=[]):
        if issubclass(kind, diffusers.ModelMixin):
            found = _of_diffusers(kind, kind.load_config(place, subfolder=folder), tensors, renames=not weights.sharded)
        else:
            own = kind.config_class.from_pretrained(place, subfolder=folder) if config is None else config
            found = _of_transformers(kind, own, tensors)
    file = "*.safetensors" if weights.sharded else weights.files[0]
    refuse(found, kind.__name__, f"{model}: {f'{folder}/{file}'.lstrip('/')}", all_used)


def loaded(info: Mapping[str, Any], network: torch.nn.Module) -> Difference:
    """How the files that transformers has loaded differ from the class.

    Args:
        info: what `from_pretrained` returned of them, asked for `output_loading_info`.
        network: the model that it returned.
    """
    return Difference(
        missing=frozenset(info["missing_keys"]),
        surplus=frozenset(info["unexpected_keys"]),
        mismatched={name: (tuple(has), tuple(asked)) for name, has, asked in info["mismatched_keys"]},
        expected=frozenset(network.state_dict()),
    )


def refuse(found: Difference, kind: str, place: str, all_used: bool = False) -> None:
    """Refuse what differs in more than tensors that nothing asks for, of which it warns.

    Args:
        kind: the name of the class.
        place: the model and its file, as an error names them.
        all_used: whether these are refused, too.

    Raises:
        InputError: one sentence with the first names.
    """
    if found.missing:
        said = lacking(found.missing, found.surplus, len(found.expected), kind)
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


def _of_diffusers(
    kind: Any, written: Mapping[str, Any], tensors: dict[str, torch.Tensor], *, renames: bool
) -> Difference:
    with accelerate.init_empty_weights(), diffusers_models.no_init_weights():
        network = kind.from_config(written)
    if renames:  # as `from_pretrained`, which renames nothing in shards
        network._fix_state_dict_keys_on_load(tensors)
    own = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    ignored = kind._keys_to_ignore_on_load_unexpected or ()
    surplus = {name for name in tensors.keys() - own if not any(re.search(pattern, name) for pattern in ignored)}
    found = Difference(
        missing=frozenset(own.keys() - tensors),
        surplus=frozenset(surplus),
        mismatched={n: (tuple(t.shape), own[n]) for n, t in tensors.items() if n in own and tuple(t.shape) != own[n]},
        expected=frozenset(own),
    )
    return _by_layer(found, tensors) if "quantization_config" in written else found


def _of_transformers(kind: Any, config: Any, tensors: dict[str, torch.Tensor]) -> Difference:
    config = copy(config)
    quantised = vars(config).pop("quantization_config", None)  # without which the class has its own layers
    network, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    found = loaded(info, network)
    return found if quantised is None else _by_layer(found, tensors)


def _by_layer(found: Difference, tensors: Mapping[str, torch.Tensor]) -> Difference:
    """The same of files that a library quantised, whose layers hold codes and scales under names of its own."""
    held = {name[:at] for name in tensors for at, letter in enumerate(name) if letter == "."}
    missing = {name for name in found.missing if name.rpartition(".")[0] not in held}
    layers = {name.rpartition(".")[0] for name in found.expected}
    surplus = {name for name in found.surplus if not any(name.startswith(f"{layer}.") for layer in layers)}
    return Difference(missing=frozenset(missing), surplus=frozenset(surplus), mismatched={}, expected=found.expected)


@contextmanager
def silent() -> Iterator[None]:
    """Without the tables, bars and warnings of the libraries: what matters of them is said in one sentence."""
    logs = [import_module(f"{library}.utils.logging") for library in ("diffusers", "transformers")]
    before = [log.get_verbosity() for log in logs]
    with hub_files.without_progress_bars("diffusers", "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for log in logs:
            log.set_verbosity_error()
        try:
            yield
        finally:
            for log, verbosity in zip(logs, before, strict=True):
                log.set_verbosity(verbosity)
