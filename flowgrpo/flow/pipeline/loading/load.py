"""Loading of a stock pipeline, or a policy, from a built-in name, a local folder or a hub id."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.data import embedded, known, tables
from flowgrpo.data.embedded import EMBEDDED, place_of
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.call_arguments import outline
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.model_files import folder_files, weight_check
from flowgrpo.training.model_files.hub_files import (
    HUB_ID,
    cached_folder,
    file_names,
    index_map,
    one_sentence,
    stands_in_for,
    weights_at,
    without_progress_bars,
)
from flowgrpo.training.weights import quantisation
from rewards.base import nearest
from rewards.compute import DTYPES, default_device
from rewards.memory import keep_freed_memory

if TYPE_CHECKING:  # imported lazily: planning does without them
    import diffusers
    import peft
    import safetensors
    import transformers
    from diffusers import DiffusionPipeline
    from safetensors import torch as safetensors_torch

    from flowgrpo.flow.pipeline import denoising_loop
    from flowgrpo.flow.pipeline import policy as policies
    from flowgrpo.flow.pipeline.loading import weightless_networks
    from flowgrpo.flow.pipeline.networks import traits
    from flowgrpo.flow.pipeline.policy import DiffusersPolicy
else:
    diffusers = lazy("diffusers")
    peft = lazy("peft")
    safetensors = lazy("safetensors")
    safetensors_torch = lazy("safetensors.torch")
    transformers = lazy("transformers")
    weightless_networks = lazy("flowgrpo.flow.pipeline.loading.weightless_networks")
    denoising_loop = lazy("flowgrpo.flow.pipeline.denoising_loop")
    policies = lazy("flowgrpo.flow.pipeline.policy")
    traits = lazy("flowgrpo.flow.pipeline.networks.traits")

LORA_FILE = "pytorch_lora_weights.safetensors"
EULER = "FlowMatchEulerDiscreteScheduler"


def load_pipeline(
    path: str,
    dtype: torch.dtype = torch.float32,
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    variant: str | None = None,
) -> DiffusionPipeline:
    """Load the stock pipeline of a built-in name, a local folder or a hub id; components in `given` are not loaded.

    Raise InputError if there is no such model or `variant`, weights are missing, or the pipeline cannot be loaded.
    """
    check_weights(path, variant)
    absent = dict.fromkeys(absent_components(path))
    with one_sentence(path), without_progress_bars("diffusers", "transformers"):
        # DiffusionPipeline does not know the optional components of its subclasses.
        kind = pipeline_class(path) if given else diffusers.DiffusionPipeline
        pipe = kind.from_pretrained(place_of(path), dtype=dtype, variant=variant, **absent, **given)
    _check_downloaded(path, set(pipe.components) - set(given), variant)
    return pipe


def _check_downloaded(path: str, names: Collection[str], variant: str | None) -> None:
    """Check downloaded weight files whose headers could not be read before the download."""
    for name in sorted(names & index_of(path).keys() if not Path(place_of(path)).is_dir() else ()):
        kind = component_class(index_of(path)[name])
        if weight_check.is_checked(kind):
            weights = weights_at(place_of(path), name, variant, weight_check.stems_of(kind))
            if weights is not None and not weights.has_headers:
                weight_check.check(path, cached_folder(path), kind, name, variant=variant)


def check_weights(
    path: str,
    variant: str | None = None,
    beginning: str | tuple[str, ...] = "",
    *,
    or_plain: bool = False,
    or_configs: bool = False,
) -> None:
    """Check, from the headers of the files, that the components whose names start with `beginning` have all weights.

    Raise InputError if `check_files` does, or weights are missing or have another shape (see `weight_check`).
    """
    check_files(path, variant, or_plain=or_plain, or_configs=or_configs)
    if path in EMBEDDED:
        return
    for name, written in index_of(path).items():
        kind = component_class(written) if name.startswith(beginning) else None
        if weight_check.is_checked(kind):
            weight_check.check(path, place_of(path), kind, name, variant=variant)


def component_class(written: Any) -> type | None:
    """Return the class of an entry [library, class] of an index; None if neither diffusers nor transformers has it."""
    if not isinstance(written, (list, tuple)) or not all(isinstance(word, str) for word in written):
        return None
    library, name = written
    places = {"diffusers": diffusers, "transformers": transformers}
    return getattr(places.get(library) or getattr(diffusers.pipelines, library, None), name, None)


def load_lora(pipe: DiffusionPipeline, folder: Path) -> None:
    """Load a LoRA from a folder of `flowgrpo export`, also into networks that the pipeline's own method leaves out."""
    if traits.loads_lora(pipe):
        before = diffusers.utils.logging.get_verbosity()
        diffusers.utils.logging.set_verbosity_error()  # it warns of components without adapters in the file
        pipe.load_lora_weights(str(folder))
        diffusers.utils.logging.set_verbosity(before)
    with safetensors.safe_open(folder / LORA_FILE, "pt") as file:
        names = {key.split(".")[0] for key in file.keys()}  # noqa: SIM118 - the file is no mapping
    for name in sorted(names):
        module = getattr(pipe, name)
        if getattr(module, "peft_config", None):
            continue
        if hasattr(module, "load_lora_adapter"):
            module.load_lora_adapter(str(folder), prefix=name, weight_name=LORA_FILE)
        else:
            _inject(module, folder / LORA_FILE, name)


def _inject(module: torch.nn.Module, file: Path, prefix: str) -> None:
    """Load a LoRA into a module without its own `load_lora_adapter`, as that method does."""
    with safetensors.safe_open(file, "pt") as opened:
        config = json.loads(opened.metadata()["lora_adapter_metadata"])
    options = {key.removeprefix(f"{prefix}."): value for key, value in config.items() if key.startswith(f"{prefix}.")}
    peft.inject_adapter_in_model(peft.LoraConfig(**options), module)
    tensors = {
        key.removeprefix(f"{prefix}."): t
        for key, t in safetensors_torch.load_file(file).items()
        if key.startswith(f"{prefix}.")
    }
    peft.set_peft_model_state_dict(module, tensors)
    module.to(next(module.parameters()).dtype)


def index_of(path: str) -> dict[str, Any]:
    """Return a model's index (model_index.json): its class and components; raise InputError if there is no such model."""
    source = place_of(path)
    if path in EMBEDDED and EMBEDDED[path].kind == "mdlm":
        raise InputError(f"model.path: {path} is a language model, set kind: mdlm")
    folder_files.refuse_file(source)
    if not Path(source).is_dir() and not re.fullmatch(HUB_ID, source):
        beside = (str(index.parent) for index in Path(source).parent.glob("*/model_index.json"))
        raise InputError(
            f"model.path: there is no folder {path!r} and no built-in model of that name (one of the hub is OWNER/NAME), "
            f"{nearest(path, [*embedded.names('flow'), *beside])}"
        )
    if Path(source).is_dir() and not (Path(source) / "model_index.json").is_file():
        folder_files.refuse_non_model(Path(source))
        language = "; for a language model set kind: mdlm" if (Path(source) / "config.json").is_file() else ""
        hint = f"; {folder_files.REMEDY}" if folder_files.is_network(Path(source)) else language
        raise InputError(f"model.path: {path} is no diffusers pipeline, it has no model_index.json{hint}")
    with one_sentence(path):
        if Path(source).is_dir():
            folder_files.refuse_pointer(Path(source) / "model_index.json")
            return index_map(tables.document(Path(source) / "model_index.json"))
        return index_map(diffusers.DiffusionPipeline.load_config(source))


def check_files(path: str, variant: str | None = None, *, or_plain: bool = False, or_configs: bool = False) -> None:
    """Check that a local folder has all files of its pipeline, without loading weights.

    For a hub id, only check that the hub has the variant. `variant` is a word in the names of the weight files to read
    (`fp16`); a component without such files uses its plain ones. For `or_plain` and `or_configs` see
    `training.model_files.folder_files.check`. Raise InputError if there is no such model, or a file is missing,
    truncated, or a Git LFS pointer.
    """
    components, folder = components_of(path), Path(place_of(path))
    if folder.is_dir():
        if not all((folder / name).is_dir() for name in components):
            components = {name: entry for name, entry in components.items() if name in list_components(path)}
        readers = {
            n: None if folder_files.WITHOUT.search(kind) else library for n, (library, kind) in components.items()
        }
        folder_files.check(folder, readers, variant=variant, or_plain=or_plain, or_configs=or_configs)
    elif variant is not None and not or_plain:
        with one_sentence(path):
            folder_files.refuse_absent(path, variant, [file_names(path, name) for name in components])


def components_of(path: str) -> dict[str, tuple[str, str]]:
    """Return the components of a model, each with its library and class; raises the errors of `index_of`."""
    pairs = {name: kind for name, kind in index_of(path).items() if isinstance(kind, (list, tuple)) and len(kind) == 2}
    return {name: tuple(kind) for name, kind in pairs.items() if all(isinstance(word, str) for word in kind)}


def list_components(path: str) -> set[str]:
    """Return the components that diffusers loads from the folder, not those that the class builds itself."""
    kind = pipeline_class(path)
    return set(kind._get_signature_keys(kind)[0])


def is_pipeline(path: str) -> bool:
    """Return whether this built-in name, folder or hub id has a model_index.json."""
    try:
        return _has_index(path)
    except InputError:
        return False


@cache  # errors are not cached
def _has_index(path: str) -> bool:
    return bool(index_of(path))


@cache
def uses_known_configs(path: str) -> bool:
    """Return whether the hub gives no index of the model, so that `data.known` provides its configs.

    Raises InputError if the hub gives no index and `data.known` does not have the model.
    """
    return stands_in_for(path, known.models(), "model_index.json", lambda: index_of(path))


def scheduler_config(path: str) -> dict[str, Any] | None:
    """Return a model's scheduler config; None unless it is a `FlowMatchEulerDiscreteScheduler`."""
    _, name = index_of(path).get("scheduler", (None, None))
    if name != EULER:
        return None
    source = place_of(path)
    if Path(source).is_dir():
        file = Path(source) / "scheduler" / "scheduler_config.json"
        written = tables.document(file)
        if not isinstance(written, dict):
            raise InputError(f"model.path: {file} holds {type(written).__name__}, not a map")
        return written
    with one_sentence(path):
        return dict(diffusers.FlowMatchEulerDiscreteScheduler.load_config(source, subfolder="scheduler"))


def check_process(path: str) -> None:
    """Raise InputError if a model's scheduler predicts noise, not a flow; no weights are loaded."""
    kind: Any = component_class(index_of(path).get("scheduler"))
    default = None if kind is None else inspect.signature(kind.__init__).parameters.get("prediction_type")
    if default is None:  # as of `FlowMatchEulerDiscreteScheduler`
        return
    with one_sentence(path):
        predicts = kind.load_config(place_of(path), subfolder="scheduler").get("prediction_type", default.default)
    denoising_loop.flow_scheduler(str(index_of(path)["_class_name"]), {"prediction_type": predicts})


def absent_components(path: str) -> list[str]:
    """Return the components that a saved pipeline lacks (SD3 without T5); loading must name them as None."""
    return [
        name for name, kind in index_of(path).items() if isinstance(kind, (list, tuple)) and list(kind) == [None, None]
    ]


def load_policy(
    path: str,
    dtype: str = "float32",
    call: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    *,
    adapter: Path | None = None,
    quantise: str | None = None,
    variant: str | None = None,
    encode: Callable[[DiffusersPolicy], object] | None = None,
    on_host: bool = False,
    **options: Any,
) -> DiffusersPolicy:
    """Load a pipeline as a policy; see `DenoisingLoop` for `options`.

    Raise InputError if there is no such model or dtype, or the model cannot be loaded or quantised.

    Args:
        path: a built-in name, a local folder or a hub id.
        dtype: `float32`, `bfloat16` or `float16`.
        call: arguments for the pipeline's call, over those of `default_call`.
        device: the first GPU by default, if there is one.
        adapter: a folder from `flowgrpo export`, for the transformer.
        quantise: `int8` or `nf4` for the transformer, before it moves to the device.
        variant: of the weight files, such as `fp16`; see `check_files`.
        encode: encodes the coming rows with the policy. Unless `text_encoders` is `keep`, it runs before the networks
            are loaded; these move to the device after the text encoders have left it. Until then the policy can only
            encode. A pipeline for which `loads_later` is False is loaded whole first.
        on_host: keep the networks in host memory, for a caller that moves them in parts; ignored unless `loads_later`.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype: {dtype!r} is unknown, {nearest(str(dtype), DTYPES)}")
    check_files(path, variant)
    call, device = {**embedded.default_call(path), **(call or {})}, torch.device(device or default_device())
    waits = encode is not None and options.get("text_encoders", "keep") != "keep"
    can_wait = (waits or on_host) and loads_later(path)
    later = weightless_networks.classes(index_of(path)) if waits and can_wait else {}
    weightless: dict[str, Any] = {}
    if later:
        stored = torch.float32 if options.get("autocast") else DTYPES[dtype]  # dtype of the weights in sampling
        with one_sentence(path):
            weightless = weightless_networks.networks(later, place_of(path), stored, device)
    pipe = load_pipeline(path, DTYPES[dtype], weightless, variant=variant)
    if later:
        pipe.to(device)
    else:
        _finish(pipe, device, adapter, quantise, on_host=traits.networks(pipe) if on_host and can_wait else ())
    policy = policies.DiffusersPolicy(pipe, call, **options)
    if encode is not None:
        encode(policy)
    if later:
        policy.offload()
        with one_sentence(path), without_progress_bars("diffusers"):
            weightless_networks.fill(pipe, later, place_of(path), DTYPES[dtype], variant=variant)
        _finish(pipe, device, adapter, quantise, on_host=traits.networks(pipe) if on_host else ())
        policy.walk.take_networks()
    return policy


def loads_later(path: str) -> bool:
    """Return whether a model's networks can be loaded after its prompts are encoded."""
    return traits.encodes_first(index_of(path)) and hasattr(planned_class(path), "encode_prompt")


def _finish(
    pipe: DiffusionPipeline,
    device: torch.device,
    adapter: Path | None,
    quantise: str | None,
    *,
    on_host: Iterable[str] = (),
) -> None:
    """Load an adapter, quantise the networks, and move all components except those named in `on_host` to the device."""
    if adapter is not None:  # before quantisation: some pipelines compare weight shapes
        load_lora(pipe, adapter)
    if quantise:
        for network in traits.networks(pipe).values():
            quantisation.quantise(network, quantise)
    if on_host:
        for name, component in pipe.components.items():
            if isinstance(component, torch.nn.Module) and name not in on_host:
                component.to(device)
    else:
        pipe.to(device)
    if device.type == "cpu":
        keep_freed_memory()


def pipeline_class(path: str) -> type[DiffusionPipeline]:
    """Return the class that a model's index names; raise InputError if there is no such model or class."""
    name = index_of(path).get("_class_name")
    pipeline = getattr(diffusers, str(name), None)
    if pipeline is None:
        raise InputError(
            f"model.path: diffusers {diffusers.__version__} has no pipeline class {name!r}, which {path} asks for"
        )
    return pipeline


def planned_class(path: str) -> type:
    """Return the `outline` of a model's class, or the class itself if it has none; raises the errors of `pipeline_class`."""
    return outline(str(index_of(path).get("_class_name"))) or pipeline_class(path)
