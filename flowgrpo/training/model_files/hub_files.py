"""Tensor shapes and checks of models in local folders and at the hub, without loading weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.data.embedded import place_of
from flowgrpo.errors import InputError
from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.model_files import folder_files
from rewards.memory import is_out_of_memory
from rewards.models import hub

if TYPE_CHECKING:
    import huggingface_hub
    import psutil
else:
    huggingface_hub = lazy("huggingface_hub")
    psutil = lazy("psutil")

HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"

LEAST = 2**30 // 20  # bytes that an option must save to be suggested

Shape = tuple[int, ...]


@contextmanager
def without_progress_bars(*libraries: str) -> Iterator[None]:
    """Return a context in which `diffusers` or `transformers` show no progress bars, except those of downloads."""
    logs = [import_module(f"{library}.utils.logging") for library in libraries]
    logs = [log for log in logs if log.is_progress_bar_enabled()]
    for log in logs:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in logs:
            log.enable_progress_bar()


def refuse_too_large(
    path: str, need: Mapping[str, int], device: torch.device, switches: Callable[[], Mapping[str, Mapping[str, int]]]
) -> None:
    """Raise InputError if a model needs more memory than the device has; suggest the options that save most.

    `need` are the needed `gpu_bytes` and `host_bytes`, and `reward_bytes` of the first. `switches` returns them for the
    model with each memory option, by the option's `key=value`.
    """
    on_gpu = device.type == "cuda"
    has = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total

    def total(needed: Mapping[str, int]) -> int:
        return needed["gpu_bytes"] if on_gpu else needed["gpu_bytes"] + needed["host_bytes"]

    if total(need) > has:
        saved = sorted(((total(need) - total(other), setting) for setting, other in switches().items()), reverse=True)
        ways = [f"{size / 2**30:.1f} GiB less with {setting}" for size, setting in saved if size >= LEAST]
        rewards = need["reward_bytes"]
        of_rewards = f" ({rewards / 2**30:.1f} of it for rewards)" if rewards else ""
        raise InputError(
            f"model.path: {path} needs at least {total(need) / 2**30:.1f} GiB for weights and optimizer{of_rewards}, "
            f"{'this GPU' if on_gpu else 'this machine'} has {has / 2**30:.1f} GiB; "
            + (", ".join(ways) or "no switch makes it much less, take a smaller model or more memory")
        )


def shapes(place: str, folder: str = "", variant: str | None = None, stems: Collection[str] = ()) -> dict[str, Shape]:
    """Return the shapes of all tensors by name, from the headers of the files; {} if there are no weights.

    `place` is a local folder or hub id, `folder` the subfolder of a component; for `stems` see
    `folder_files.weights_of`. Raises InputError if only other variants than `variant` have weights.
    """
    weights = weights_at(place, folder, variant, stems)
    if weights is None:
        names = file_names(place, folder)
        if folder_files.variants_of(names):
            folder_files.refuse_lack(f"{place}/{folder}".rstrip("/"), names)
        return {}
    source = local_place(place)
    if Path(source).is_dir():
        return folder_files.shapes_of(Path(source) / folder, weights)
    files = [f"{folder}/{name}".lstrip("/") for name in weights.files if name.endswith(".safetensors")]
    return {key: shape for file in files for key, shape in _hub_shapes(place, file).items()}


def variant_of(place: str, folder: str, variant: str | None) -> str | None:
    """Return `variant` if a component has it, else None."""
    weights = None if variant is None else weights_at(place, folder, variant)
    return None if weights is None else weights.variant


def weights_at(
    place: str, folder: str = "", variant: str | None = None, stems: Collection[str] = ()
) -> folder_files.Weights | None:
    """Return the weight files of the variant, or else the plain ones, or else None. Arguments: see `shapes`."""
    return folder_files.weights_of(file_names(place, folder), variant, stems)


def cached_folder(place: str) -> str:
    """Return the folder of a hub model in the local cache."""
    return huggingface_hub.snapshot_download(place, local_files_only=True)


def file_names(place: str, folder: str = "") -> list[str]:
    """Return the file names in a model's folder or subfolder, local or at the hub; [] if it is missing."""
    source = local_place(place)
    if Path(source).is_dir():
        return folder_files.files_of(Path(source) / folder) if (Path(source) / folder).is_dir() else []
    return [file.rpartition("/")[2] for file in _hub_files(place) if file.rpartition("/")[0] == folder]


@cache  # loading the model asks for the same files again
def _hub_files(place: str) -> list[str]:
    return huggingface_hub.HfApi().list_repo_files(place)


@cache
def _hub_shapes(place: str, file: str) -> dict[str, Shape]:
    tensors = huggingface_hub.HfApi().parse_safetensors_file_metadata(place, file).tensors
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def local_place(place: str) -> str:
    """Return a folder or hub id unchanged; if the hub does not answer, return the cached folder of a hub id."""
    return place if Path(place).is_dir() or hub.is_reachable() else cached_folder(place)


@contextmanager
def one_sentence(path: str, key: str = "model.path") -> Iterator[None]:
    """Return a context that turns errors of loading, except out of memory, into one sentence that begins with `key`."""
    try:
        with warnings.catch_warnings(), hub.cache_if_unreachable(place_of(path)):
            warnings.filterwarnings("ignore", "The `local_dir_use_symlinks` argument")  # diffusers passes it
            yield
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"{key}: {path} {_explain(path, error, key)}") from error


def stands_in_for(path: str, known: Container[str], file: str, look: Callable[[], object]) -> bool:
    """Return whether the built-in config of a hub id must replace a model that cannot be downloaded.

    Args:
        known: hub ids with a built-in config.
        file: a file of the model, whose download is tested.
        look: raises InputError if the model cannot be loaded. Without a built-in config, this error is not caught.
    """
    is_known = path in known and not Path(path).is_dir()
    if is_known and not hub.can_load(path, file):
        return True
    try:
        look()
    except InputError:
        if not is_known:
            raise
        return True
    return False


def _explain(path: str, error: Exception, key: str) -> str:
    """Return why a model cannot be loaded, as a phrase that follows the model's name."""
    reason = f"({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    if Path(place_of(path)).is_dir():
        return f"could not be loaded from its folder {reason}"
    return (
        hub.explain_failure(error, path, f"set {key} to a folder") or f"could not be loaded from the model hub {reason}"
    )


def index_map(written: Any) -> dict[str, Any]:
    """Return the content of a model_index.json. Raises ValueError if diffusers cannot have written it."""
    if not isinstance(written, dict) or not isinstance(written.get("_class_name", ""), str):
        raise ValueError("its model_index.json is not a map with the name of a class")
    return dict(written)
