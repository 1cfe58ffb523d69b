"""Models in local folders and at the hub: the shapes of their tensors, and what can be refused without loading weights."""

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

LEAST = 2**30 // 20  # bytes that a switch must spare to be named

Shape = tuple[int, ...]


@contextmanager
def without_progress_bars(*libraries: str) -> Iterator[None]:
    """Keep the bars of loading and saving out of the log; those of a download stay.

    Args:
        libraries: `diffusers`, `transformers`.
    """
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
    """Refuse a model that cannot fit, with the switches that would make it smaller, the best first.

    Args:
        need: `gpu_bytes` and `host_bytes`.
        switches: returns settings, as one writes them, each with what the run would need with it.

    Raises:
        InputError: the model needs more memory than there is.
    """
    on_gpu = device.type == "cuda"
    has = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total

    def asked(needed: Mapping[str, int]) -> int:
        return needed["gpu_bytes"] if on_gpu else needed["gpu_bytes"] + needed["host_bytes"]

    if asked(need) > has:
        spared = sorted(((asked(need) - asked(other), setting) for setting, other in switches().items()), reverse=True)
        ways = [f"{size / 2**30:.1f} GiB less with {setting}" for size, setting in spared if size >= LEAST]
        raise InputError(
            f"model.path: {path} needs at least {asked(need) / 2**30:.1f} GiB for weights and optimizer, "
            f"{'this GPU' if on_gpu else 'this machine'} has {has / 2**30:.1f} GiB; "
            + (", ".join(ways) or "no switch makes it much less, take a smaller model or more memory")
        )


def shapes(place: str, folder: str = "", variant: str | None = None, stems: Collection[str] = ()) -> dict[str, Shape]:
    """Shapes of all tensors, as the heads of a model's files in a folder or at the hub say; {} without weights.

    Args:
        place: local folder or hub id.
        folder: below the place.
        variant: of the weights that are read, where there are any of it.
        stems: see `folder_files.weights_of`.

    Raises:
        InputError: there are weights of other variants only.
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
    """The variant of the weights that a component has: the one asked for, or None where its weights are plain."""
    weights = None if variant is None else weights_at(place, folder, variant)
    return None if weights is None else weights.variant


def weights_at(
    place: str, folder: str = "", variant: str | None = None, stems: Collection[str] = ()
) -> folder_files.Weights | None:
    """The files that weights are read from, of the variant where there are any, otherwise plain ones; None without either.

    Args:
        place: of the model, a folder or a hub id.
        folder: of the component.
        stems: see `folder_files.weights_of`.
    """
    return folder_files.weights_of(file_names(place, folder), variant, stems)


def downloaded(place: str) -> str:
    """The folder of a model at the hub whose files have been loaded."""
    return huggingface_hub.snapshot_download(place, local_files_only=True)


def file_names(place: str, folder: str = "") -> list[str]:
    """The names of the files in a model's folder, here or at the hub, or of one below it; [] where there is none."""
    source = local_place(place)
    if Path(source).is_dir():
        return folder_files.files_of(Path(source) / folder) if (Path(source) / folder).is_dir() else []
    return [file.rpartition("/")[2] for file in _hub_files(place) if file.rpartition("/")[0] == folder]


@cache  # the same files are asked for again when the model is loaded
def _hub_files(place: str) -> list[str]:
    return huggingface_hub.HfApi().list_repo_files(place)


@cache
def _hub_shapes(place: str, file: str) -> dict[str, Shape]:
    tensors = huggingface_hub.HfApi().parse_safetensors_file_metadata(place, file).tensors
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def local_place(place: str) -> str:
    """A folder as it is; for a hub id its snapshot in the cache if the hub does not answer, otherwise the id."""
    if not Path(place).is_dir() and not hub.answers():
        return huggingface_hub.snapshot_download(place, local_files_only=True)
    return place


@contextmanager
def one_sentence(path: str, key: str = "model.path") -> Iterator[None]:
    """Turn what is raised about a model that cannot be read, which may be anything, into one sentence with the way out.

    Args:
        key: the place named in errors.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The `local_dir_use_symlinks` argument")  # diffusers still gives it
            yield
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"{key}: {path} {_why(path, error, key)}") from error


def stands_in_for(path: str, known: Container[str], file: str, look: Callable[[], object]) -> bool:
    """Whether the hub does not give a model, now, and configs that are known here stand in.

    Args:
        known: the hub ids of which there are configs here.
        file: one that the model has.
        look: looks for the model, and raises InputError where it is not had.

    Raises:
        InputError: there is no such model, and it is not known here.
    """
    is_known = path in known and not Path(path).is_dir()
    if is_known and not hub.may_give(path, file):
        return True
    try:
        look()
    except InputError:
        if not is_known:
            raise
        return True
    return False


def _why(path: str, error: Exception, key: str) -> str:
    """Why a model cannot be loaded, to be said after its name."""
    reason = f"({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    if Path(place_of(path)).is_dir():
        return f"could not be loaded from its folder {reason}"
    return hub.why(error, path, f"set {key} to a folder") or f"could not be loaded from the model hub {reason}"


def index_map(written: Any) -> dict[str, Any]:
    """A pipeline's index (model_index.json), as long as it is what diffusers writes.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(written, dict) or not isinstance(written.get("_class_name", ""), str):
        raise ValueError("its model_index.json is not a map with the name of a class")
    return dict(written)
