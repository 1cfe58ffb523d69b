"""Choice of the weight files in a model's folder, and checks of the folder before any weights are loaded.

A component's weights are one file, or shards that an index lists. Names of a variant's files contain its name.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    import safetensors
else:
    safetensors = lazy("safetensors")

KEY, VARIANT = "model.path", "model.variant"
LORAS = ("pytorch_lora_weights.safetensors", "adapter_config.json")  # files of exported adapters
SINGLE = (".safetensors", ".gguf", ".bin", ".ckpt", ".pt", ".pth")  # suffixes of single-file models
REMEDY = "to train a network alone, save it into its pipeline: docs/guides/adapters.md, Full weights that you have"
BESIDE = (".json", ".txt", ".model", ".jinja")  # suffixes of other files that are read
WITHOUT = re.compile("Tokenizer|Processor|Extractor|Scheduler|Guidance")  # class names without weights
STEM = r"(?P<stem>diffusion_pytorch_model|pytorch_model|model)"
FORM, SHARD = r"\.(?P<form>safetensors|bin)", r"-\d{5,}-of-\d{5,}"
WHOLE = (re.compile(rf"{STEM}(\.(?P<variant>(?![^.]*{SHARD})[^.]+))?{FORM}"),)
# The second pattern in each tuple is for files of early versions of diffusers.
SHARDS = (
    re.compile(rf"{STEM}(\.(?P<variant>[^.]+))?{SHARD}{FORM}"),
    re.compile(rf"{STEM}{SHARD}\.(?P<variant>[^.]+){FORM}"),
)
INDEX = (
    re.compile(rf"{STEM}{FORM}\.index(\.(?P<variant>[^.]+))?\.json"),
    re.compile(rf"{STEM}{FORM}\.(?P<variant>[^.]+)\.index\.json"),
)
# File layouts (stem, form) in the order of preference, and whether an index is preferred to a single file.
LAYOUTS = {
    ("diffusion_pytorch_model", "safetensors"): True,
    ("model", "safetensors"): False,
    ("diffusion_pytorch_model", "bin"): False,
    ("pytorch_model", "bin"): False,
}
STEMS = {"diffusers": ("diffusion_pytorch_model",), "transformers": ("model", "pytorch_model")}
UNSHARDED = ("diffusion_pytorch_model", "bin")  # diffusers reads no shards of this layout


@dataclass(frozen=True)
class Weights:
    """The files of a component's weights."""

    variant: str | None
    files: tuple[str, ...]  # one file, or all shards in the folder
    index: str | None  # file name of the shards' index; None without shards or if it is missing

    @property
    def has_headers(self) -> bool:
        """Whether the files' headers hold the shapes of tensors."""
        return all(name.endswith(".safetensors") for name in self.files)

    @property
    def sharded(self) -> bool:
        """Whether the files are shards."""
        return self.index is not None or re.search(SHARD, self.files[0]) is not None


def weights_of(names: Iterable[str], variant: str | None = None, stems: Collection[str] = ()) -> Weights | None:
    """Choose the weights of the variant among file names, or else plain weights, or else None.

    Only file names that begin with one of the `stems` are considered; without `stems`, all are.
    """
    weights = _by_variant(names, stems)
    return weights.get(variant) or weights.get(None)


def variants_of(names: Iterable[str]) -> list[str]:
    """Return the variants among a folder's file names, sorted."""
    return sorted(variant for variant in _by_variant(names) if variant is not None)


def _by_variant(names: Iterable[str], stems: Collection[str] = ()) -> dict[str | None, Weights]:
    layouts: dict[str | None, dict[tuple[str, str], dict[str, list[str]]]] = {}
    for name in sorted(names):
        for kind, patterns in {"whole": WHOLE, "shards": SHARDS, "index": INDEX}.items():
            match = next(filter(None, (pattern.fullmatch(name) for pattern in patterns)), None)
            if match is not None and (not stems or match["stem"] in stems):
                layout = layouts.setdefault(match["variant"], {}).setdefault((match["stem"], match["form"]), {})
                layout.setdefault(kind, []).append(name)
    weights = {variant: _choose_layout(variant, each) for variant, each in layouts.items()}
    return {variant: each for variant, each in weights.items() if each is not None}


def _choose_layout(variant: str | None, layouts: Mapping[tuple[str, str], Mapping[str, list[str]]]) -> Weights | None:
    """Choose the weights in the layout that diffusers and transformers prefer."""
    for layout, index_first in LAYOUTS.items():
        files = layouts.get(layout, {})
        index = next(iter(files.get("index", ())), None) if layout != UNSHARDED else None
        shards = tuple(files.get("shards", ())) if layout != UNSHARDED else ()
        if "whole" in files and not (index_first and index):
            return Weights(variant, (files["whole"][0],), None)
        if index or shards:
            return Weights(variant, shards, index)
    return None


def refuse_file(path: str, remedy: str = REMEDY) -> None:
    """Raise InputError if a model's path is a file or a missing file's name; `remedy` ends the message about weights."""
    if Path(path).suffix in (".yaml", ".yml") and not Path(path).is_dir():
        raise InputError(f"{KEY}: {path} is a config, not a model; give the model that it names")
    if Path(path).is_file():
        raise InputError(f"{KEY}: {path} is a file, not a model's folder; {remedy}")
    if path.endswith(SINGLE) and not Path(path).is_dir():
        raise InputError(f"{KEY}: there is no file {path}, and a file is not a model's folder; {remedy}")


def is_network(folder: Path) -> bool:
    """Return whether diffusers saved a single network into a folder, so that its config.json names a class.

    Raises InputError if config.json cannot be read.
    """
    file = folder / "config.json"
    if not file.is_file():
        return False
    refuse_pointer(file)
    written = tables.document(file)
    return isinstance(written, dict) and "_class_name" in written


def refuse_non_model(folder: Path) -> None:
    """Raise InputError if a folder is empty, a run's or a LoRA's."""
    if not any(folder.iterdir()):
        raise InputError(f"{KEY}: {folder} is an empty folder")
    if any((folder / name).is_file() for name in LORAS) and not (folder / "config.json").is_file():
        raise InputError(f"{KEY}: {folder} is a LoRA; give its model, and the LoRA as model.lora.path={folder}")
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        raise InputError(
            f"{KEY}: {folder} is a run; export it and give the export (of a LoRA: give its model, and "
            f"model.lora.path={folder})"
        )


def refuse_pointer(file: Path) -> None:
    """Raise InputError if a file is a Git LFS pointer."""
    tables.refuse_pointer(file, f"{KEY}: ")


def check(
    place: Path,
    components: Mapping[str, str | None],
    *,
    variant: str | None = None,
    or_plain: bool = False,
    or_configs: bool = False,
) -> None:
    """Raise InputError if files of a model are missing, truncated or LFS pointers. Only configs and headers are read.

    Args:
        components: subfolders ("" is the folder itself), each with the library that reads its weights, or None if it
            has no weights.
        variant: variant of the weights; a component that lacks it uses plain weights.
        or_plain: whether all components may lack the variant.
        or_configs: whether the folder may hold configs without any weights.
    """
    refuse_missing(place, components)
    names = {name: files_of(place / name) for name in components}
    configs_only = or_configs and not any(_by_variant(files) for files in names.values())
    for name, library in components.items():
        weights = weights_of(names[name], variant, STEMS.get(library or "", ()))
        needs_weights = library is not None and not configs_only
        _check_component(place / name, names[name], weights, needs_weights=needs_weights)
    if variant is not None and not (or_plain or configs_only):
        refuse_absent(str(place), variant, names.values())


def refuse_missing(place: Path, components: Iterable[str]) -> None:
    """Raise InputError if a pipeline's folder lacks the subfolder of a component."""
    for name in components:
        if not (place / name).is_dir():
            raise InputError(f"{KEY}: {place} has no folder {name}, which its model_index.json names")


def refuse_absent(path: str, variant: str, folders: Iterable[Iterable[str]]) -> None:
    """Raise InputError if no component has the variant; `folders` are the file names of each component."""
    there = sorted({each for names in folders for each in variants_of(names)})
    if variant not in there:
        others = f"there are {' and '.join(there)}" if there else "remove it, the weights are of no variant"
        raise InputError(f"{VARIANT}: {path} has no {variant} weights, {others}")


def refuse_lack(folder: str, names: Iterable[str]) -> None:
    """Raise InputError for a component without readable weights; the message names the variants in its folder."""
    there = variants_of(names)
    if there:
        ways = " or ".join(f"{VARIANT}={each}" for each in there)
        raise InputError(f"{KEY}: {folder} holds {' and '.join(there)} weights only, set {ways}")
    raise InputError(f"{KEY}: {folder} has no weights, neither safetensors nor .bin under a name that is read here")


def shapes_of(folder: Path, weights: Weights) -> dict[str, tuple[int, ...]]:
    """Return a component's tensor shapes by name, from headers or pickles. Raises InputError if a shard is missing."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in _list_files(folder, weights):
        if name.endswith(".safetensors"):
            with safetensors.safe_open(folder / name, "pt") as opened:
                shapes |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        else:
            map_tensors = zipfile.is_zipfile(folder / name)  # older pickles are no archives and cannot be mapped
            tensors = torch.load(folder / name, map_location="meta", mmap=map_tensors, weights_only=True)
            shapes |= {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return shapes


def files_of(folder: Path) -> list[str]:
    """Return the sorted names of a folder's files, broken links included."""
    return sorted(each.name for each in folder.iterdir() if not each.is_dir())


def _check_component(folder: Path, names: list[str], weights: Weights | None, *, needs_weights: bool) -> None:
    for name in names:
        if name.endswith(BESIDE):
            refuse_pointer(folder / name)
    refuse_non_model(folder)
    if weights is None:
        if needs_weights:
            refuse_lack(str(folder), names)
        return
    if needs_weights and "config.json" not in names:
        raise InputError(f"{KEY}: {folder} has weights and no config.json")
    for name in _list_files(folder, weights):
        _check_weights(folder / name)


def _list_files(folder: Path, weights: Weights) -> tuple[str, ...]:
    """Return the names of the weight files: one file, or the shards that the index lists, which must exist."""
    if not weights.sharded:
        return weights.files
    if weights.index is None:
        raise InputError(
            f"{KEY}: {folder} has shards such as {weights.files[0]} and no index, which says what they hold"
        )
    index = folder / weights.index
    refuse_pointer(index)
    written = tables.document(index)
    shards = written.get("weight_map") if isinstance(written, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(each, str) for each in shards.values()):
        raise InputError(f"{KEY}: {index} is no index, which has a weight_map from tensors to files")
    named = tuple(sorted(set(shards.values())))
    for name in named:
        if not name or Path(name).name != name:
            raise InputError(f"{KEY}: {index} names {name!r}, which is not a file of its folder")
    lost = [name for name in named if not (folder / name).is_file()]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise InputError(f"{KEY}: {folder} lacks {lost[0]}{more}, which {weights.index} names")
    return named


def _check_weights(file: Path) -> None:
    if not file.is_file():
        raise InputError(f"{KEY}: {file} is a link to nothing")
    refuse_pointer(file)
    reason = _find_damage(file)
    if reason is not None:
        raise InputError(f"{KEY}: {file} is cut off or damaged ({reason}); get it again")


def _find_damage(file: Path) -> str | None:
    if file.suffix == ".safetensors":
        try:
            with safetensors.safe_open(file, "pt"):
                return None
        except (OSError, safetensors.SafetensorError) as error:
            return " ".join(str(error).split())
    with file.open("rb") as opened:
        zipped = opened.read(2) == b"PK"  # older pickles are no archives
    if file.stat().st_size == 0:
        return "it is empty"
    return None if not zipped or zipfile.is_zipfile(file) else "an archive without its end"
