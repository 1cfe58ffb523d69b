"""The files of a model's folder: which of them hold weights, and what is wrong with them before any weights are loaded.

A component's weights are one file, or shards that an index names. Files of a variant have its word in their names, as
`diffusion_pytorch_model.fp16.safetensors` has.
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
SINGLE = (".safetensors", ".gguf", ".bin", ".ckpt", ".pt", ".pth")  # suffixes of weights in one file
REMEDY = "to train a network alone, save it into its pipeline: docs/config.md, Full weights that you have"
BESIDE = (".json", ".txt", ".model", ".jinja")  # suffixes of what is read beside the weights
WITHOUT = re.compile("Tokenizer|Processor|Extractor|Scheduler|Guidance")  # in names of classes that have no weights
STEM = r"(?P<stem>diffusion_pytorch_model|pytorch_model|model)"
FORM, SHARD = r"\.(?P<form>safetensors|bin)", r"-\d{5,}-of-\d{5,}"
WHOLE = (re.compile(rf"{STEM}(\.(?P<variant>(?![^.]*{SHARD})[^.]+))?{FORM}"),)
# The second of each is how diffusers once wrote them.
SHARDS = (
    re.compile(rf"{STEM}(\.(?P<variant>[^.]+))?{SHARD}{FORM}"),
    re.compile(rf"{STEM}{SHARD}\.(?P<variant>[^.]+){FORM}"),
)
INDEX = (
    re.compile(rf"{STEM}{FORM}\.index(\.(?P<variant>[^.]+))?\.json"),
    re.compile(rf"{STEM}{FORM}\.(?P<variant>[^.]+)\.index\.json"),
)
# By name and form the files of weights in the order in which they are looked for, and whether an index goes before a file.
LAYOUTS = {
    ("diffusion_pytorch_model", "safetensors"): True,
    ("model", "safetensors"): False,
    ("diffusion_pytorch_model", "bin"): False,
    ("pytorch_model", "bin"): False,
}
STEMS = {"diffusers": ("diffusion_pytorch_model",), "transformers": ("model", "pytorch_model")}
UNSHARDED = ("diffusion_pytorch_model", "bin")  # diffusers reads no shards of these


@dataclass(frozen=True)
class Weights:
    """The files that a component's weights are read from.

    Attributes:
        variant: in their names; None of plain ones.
        files: their names; of shards all that are in the folder.
        index: the file that names the shards; None of one file, and where it is missing.
    """

    variant: str | None
    files: tuple[str, ...]
    index: str | None

    @property
    def has_headers(self) -> bool:
        """Whether the shapes of tensors stand at the heads of the files."""
        return all(name.endswith(".safetensors") for name in self.files)

    @property
    def sharded(self) -> bool:
        """Whether the files are shards."""
        return self.index is not None or re.search(SHARD, self.files[0]) is not None


def weights_of(names: Iterable[str], variant: str | None = None, stems: Collection[str] = ()) -> Weights | None:
    """Choose the weights that are read from a folder; those of the variant where there are any, otherwise plain ones.

    Args:
        names: of the folder's files.
        stems: how the names begin of those that its library reads; () for any library.

    Returns:
        None where there are neither.
    """
    found = _by_variant(names, stems)
    return found.get(variant) or found.get(None)


def variants_of(names: Iterable[str]) -> list[str]:
    """The variants of which a folder has weights, sorted; plain ones are none."""
    return sorted(variant for variant in _by_variant(names) if variant is not None)


def _by_variant(names: Iterable[str], stems: Collection[str] = ()) -> dict[str | None, Weights]:
    """All weights that could be read from files of these names; see `weights_of`."""
    found: dict[str | None, dict[tuple[str, str], dict[str, list[str]]]] = {}
    for name in sorted(names):
        for kind, patterns in {"whole": WHOLE, "shards": SHARDS, "index": INDEX}.items():
            match = next(filter(None, (pattern.fullmatch(name) for pattern in patterns)), None)
            if match is not None and (not stems or match["stem"] in stems):
                of_variant = found.setdefault(match["variant"], {}).setdefault((match["stem"], match["form"]), {})
                of_variant.setdefault(kind, []).append(name)
    every = {variant: _first(variant, own) for variant, own in found.items()}
    return {variant: own for variant, own in every.items() if own is not None}


def _first(variant: str | None, found: Mapping[tuple[str, str], Mapping[str, list[str]]]) -> Weights | None:
    """The weights of a variant that libraries take first."""
    for layout, index_first in LAYOUTS.items():
        own = found.get(layout, {})
        index = next(iter(own.get("index", ())), None) if layout != UNSHARDED else None
        shards = tuple(own.get("shards", ())) if layout != UNSHARDED else ()
        if "whole" in own and not (index_first and index):
            return Weights(variant, (own["whole"][0],), None)
        if index or shards:
            return Weights(variant, shards, index)
    return None


def refuse_file(path: str, remedy: str = REMEDY) -> None:
    """Refuse the path of one file in the place of a model's folder, whether it is there or not.

    Args:
        remedy: what to do instead.

    Raises:
        InputError: it is one.
    """
    if Path(path).is_file():
        raise InputError(f"{KEY}: {path} is a file, not a model's folder; {remedy}")
    if path.endswith(SINGLE) and not Path(path).is_dir():
        raise InputError(f"{KEY}: there is no file {path}, and a file is not a model's folder; {remedy}")


def is_network(folder: Path) -> bool:
    """Whether a folder is that of a network alone, as diffusers saves it: its config.json names a class.

    Raises:
        InputError: the file cannot be read, or is a pointer.
    """
    file = folder / "config.json"
    if not file.is_file():
        return False
    refuse_pointer(file)
    written = tables.document(file)
    return isinstance(written, dict) and "_class_name" in written


def refuse_empty(folder: Path) -> None:
    """Refuse a folder with nothing in it.

    Raises:
        InputError: there is nothing.
    """
    if not any(folder.iterdir()):
        raise InputError(f"{KEY}: {folder} is an empty folder")


def refuse_pointer(file: Path) -> None:
    """Refuse a file that Git LFS has not fetched.

    Raises:
        InputError: there is a pointer in its place.
    """
    tables.refuse_pointer(file, f"{KEY}: ")


def check(
    place: Path,
    components: Mapping[str, str | None],
    *,
    variant: str | None = None,
    or_plain: bool = False,
    or_configs: bool = False,
) -> None:
    """Refuse a model's folder of which files are missing, cut off or pointers; reads configs and heads of files.

    Args:
        components: the folders in it that the model is made of, each with the library that reads its weights, or None where
            it need not hold any; "" is the folder itself.
        variant: of the weights that are asked for; a component that has none of it has plain ones.
        or_plain: whether all components may have plain ones.
        or_configs: whether the folder may hold no weights at all.

    Raises:
        InputError: one sentence with the file, or the folder, and what to do.
    """
    refuse_missing(place, components)
    names = {name: files_of(place / name) for name in components}
    alone = or_configs and not any(_by_variant(own) for own in names.values())
    for name, library in components.items():
        weights = weights_of(names[name], variant, STEMS.get(library or "", ()))
        needs_weights = library is not None and not alone
        _check_component(place / name, names[name], weights, needs_weights=needs_weights)
    if variant is not None and not (or_plain or alone):
        refuse_absent(str(place), variant, names.values())


def refuse_missing(place: Path, components: Iterable[str]) -> None:
    """Refuse a pipeline's folder without the folders of its components.

    Raises:
        InputError: one is not there.
    """
    for name in components:
        if not (place / name).is_dir():
            raise InputError(f"{KEY}: {place} has no folder {name}, which its model_index.json names")


def refuse_absent(path: str, variant: str, folders: Iterable[Iterable[str]]) -> None:
    """Refuse a variant that a model does not have.

    Args:
        folders: of each component the names of its files.

    Raises:
        InputError: no component has weights of it; names those that there are.
    """
    there = sorted({each for names in folders for each in variants_of(names)})
    if variant not in there:
        others = f"there are {' and '.join(there)}" if there else "remove it, the weights are of no variant"
        raise InputError(f"{VARIANT}: {path} has no {variant} weights, {others}")


def refuse_lack(folder: str, names: Iterable[str]) -> None:
    """Refuse a component's folder without weights that can be read.

    Raises:
        InputError: always; says of which variants there are some.
    """
    there = variants_of(names)
    if there:
        ways = " or ".join(f"{VARIANT}={each}" for each in there)
        raise InputError(f"{KEY}: {folder} holds {' and '.join(there)} weights only, set {ways}")
    raise InputError(f"{KEY}: {folder} has no weights, neither safetensors nor .bin under a name that is read here")


def shapes_of(folder: Path, weights: Weights) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a component by name, of which no numbers are read.

    Raises:
        InputError: a shard is missing.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in _named(folder, weights):
        if name.endswith(".safetensors"):
            with safetensors.safe_open(folder / name, "pt") as opened:
                found |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        else:
            map_tensors = zipfile.is_zipfile(folder / name)  # older pickles are read whole
            tensors = torch.load(folder / name, map_location="meta", mmap=map_tensors, weights_only=True)
            found |= {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return found


def files_of(folder: Path) -> list[str]:
    """The names of what lies in a folder but folders, sorted; broken links too."""
    return sorted(each.name for each in folder.iterdir() if not each.is_dir())


def _check_component(folder: Path, names: list[str], weights: Weights | None, *, needs_weights: bool) -> None:
    for name in names:
        if name.endswith(BESIDE):
            refuse_pointer(folder / name)
    refuse_empty(folder)
    if weights is None:
        if needs_weights:
            refuse_lack(str(folder), names)
        return
    if needs_weights and "config.json" not in names:
        raise InputError(f"{KEY}: {folder} has weights and no config.json")
    for name in _named(folder, weights):
        _check_weights(folder / name)


def _named(folder: Path, weights: Weights) -> tuple[str, ...]:
    """The files of weights, of shards those that the index names."""
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
    """Refuse a file of weights that is no whole one, by its head and its size."""
    if not file.is_file():
        raise InputError(f"{KEY}: {file} is a link to nothing")
    refuse_pointer(file)
    reason = _damage(file)
    if reason is not None:
        raise InputError(f"{KEY}: {file} is cut off or damaged ({reason}); get it again")


def _damage(file: Path) -> str | None:
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
