"""Reading of LoRA files for `model.lora.path`, without a model; `lora_layers` maps their tensors to networks."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from flowgrpo.data import run_folders, tables
from flowgrpo.data.yaml_maps import read_map
from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.model_files.hub_files import HUB_ID, one_sentence
from flowgrpo.training.weights.lora_adapters import METADATA
from flowgrpo.training.weights.trained_weights import AVERAGE, OTHER_POLICIES

if TYPE_CHECKING:
    import huggingface_hub
else:
    huggingface_hub = lazy("huggingface_hub")

C = TypeVar("C", bound=RunConfig)

KEY = "model.lora.path"
START = "start.safetensors"  # a run's own copy of the adapters that it started from
USUAL = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
CONFIG = "adapter_config.json"
COMFYUI = "comfyui"  # subfolder of an export; diffusers looks for a LoRA at the top of the folder only
SHIFT = re.compile(r"(.+)\.(diff|diff_b|diff_m|w_norm|b_norm)")  # full-rank changes of a parameter
OTHERS = {
    "lora_magnitude_vector": "a DoRA",
    "dora_scale": "a DoRA",
    "lokr_": "a LoKr",
    "hada_": "a LoHa",
    "oft_": "an OFT",
    "vera_lambda": "a VeRA",
    "lora_embedding": "a LoRA of embeddings",
}
TEXT_ENCODERS = ("text_encoder", "lora_te", "text_model.", "conditioner.")


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """The content of a LoRA file."""

    place: str  # as the user wrote it
    tensors: Mapping[str, torch.Tensor]  # by the names in the file, without those of text encoders
    options: Mapping[str, Mapping[str, Any]]  # of peft, by network name; "" is for all networks

    @property
    def size(self) -> int:
        """Number of adapter weights."""
        return sum(tensor.numel() for key, tensor in self.tensors.items() if not key.endswith(".alpha"))


def with_kept_lora(settings: C, folder: Path) -> C:
    """Return a begun run's config, with its copy `START` as `model.lora.path` or `model.merge`.

    Raises InputError if the copy is missing.
    """
    model, own = settings.model, str(folder / START)
    if model.merge is None and (model.lora is None or model.lora.path is None):
        return settings
    if not Path(own).is_file():
        raise InputError(f"{folder}: {START} is missing, the copy of what the run started from")
    changed = {"merge": own} if model.lora is None else {"lora": model.lora.model_copy(update={"path": own})}
    return settings.model_copy(update={"model": model.model_copy(update=changed)})


@contextmanager
def named(key: str) -> Iterator[None]:
    """Replace `model.lora.path` by another config key or command option in error messages about a LoRA."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(KEY, key)) from error


def read(path: str) -> LoraFile:
    """Read a LoRA from a file, a folder (an export's or a run's too) or a hub id, `owner/name` or `owner/name/file`.

    Raises InputError if it is missing, unreadable, or of a kind that cannot be trained here.
    """
    file = _locate(path)
    tensors, options = _read_run(path, file) if file.is_dir() else _read_file(path, file)
    if not any("lora" in key for key in tensors) and not any(word in key for key in tensors for word in OTHERS):
        first = min(tensors, default="nothing")
        raise InputError(f"{KEY}: {path} is no LoRA, it holds {first}; weights of a whole model go to model.path")
    for key in sorted(tensors):
        for word, kind in OTHERS.items():
            if word in key:
                raise InputError(f"{KEY}: {path} is {kind} ({key}), only plain LoRA can be trained on")
    of_networks = {key: tensor for key, tensor in tensors.items() if not key.startswith(TEXT_ENCODERS)}
    if not of_networks:
        raise InputError(f"{KEY}: {path} has adapters for text encoders only ({min(tensors)}), which are not trained")
    if len(of_networks) < len(tensors):
        warnings.warn(f"{KEY}: {path} has adapters for text encoders too, they are left out", stacklevel=2)
    zeros = [key for key, tensor in of_networks.items() if SHIFT.fullmatch(key) and not tensor.any()]
    if zeros:
        warnings.warn(f"{KEY}: {path} has {len(zeros)} shifts of zeros, {zeros[0]} first; left out", stacklevel=2)
    tensors = {key: tensor for key, tensor in of_networks.items() if key not in zeros}
    return LoraFile(place=path, tensors=tensors, options=options)


def _locate(path: str) -> Path:
    """Return the local LoRA file of a path, downloaded if needed; if the path is a run's folder, return that folder."""
    here = Path(path)
    if here.is_file():
        return here
    if here.is_dir():
        if (here / "config.yaml").is_file():
            return here
        if (here / COMFYUI).is_dir() and not any(file.suffix == ".safetensors" for file in here.iterdir()):
            here = here / COMFYUI
        return here / _choose(path, [file.name for file in here.iterdir()])
    parts = path.split("/")
    if len(parts) < 2 or here.is_absolute() or not re.fullmatch(HUB_ID, "/".join(parts[:2])):
        raise InputError(f"{KEY}: there is no file or folder {path!r}{run_folders.nearest_file(here)}")
    name, inside = "/".join(parts[:2]), "/".join(parts[2:])
    with one_sentence(name, KEY):
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
            inside = inside or _choose(path, [file.name for file in folder.iterdir()])
            return folder / inside
        inside = inside or _choose(path, huggingface_hub.HfApi().list_repo_files(name))
        if inside.endswith(USUAL[1]):
            huggingface_hub.hf_hub_download(name, inside.removesuffix(USUAL[1]) + CONFIG)  # into the same folder
        return Path(huggingface_hub.hf_hub_download(name, inside))


def _choose(path: str, names: Iterable[str]) -> str:
    names = set(names)
    if "model_index.json" in names:
        raise InputError(f"{KEY}: {path} is a whole pipeline, not a LoRA; give it as the model")
    files = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    for usual in USUAL:
        if usual in files:
            return usual
    if len(files) == 1:
        return files[0]
    if not files:
        raise InputError(f"{KEY}: {path} holds no .safetensors file and is no run's folder")
    raise InputError(f"{KEY}: {path} holds several files, name one of {', '.join(files[:8])}")


def _read_file(path: str, file: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Return a file's tensors in float32, and peft's options from its header or from `CONFIG` in the same folder."""
    path = path if path.endswith(file.name) else f"{path}/{file.name}"
    if file.suffix != ".safetensors":
        raise InputError(f"{KEY}: {path} is no .safetensors file; files of other formats may run code as they are read")
    try:
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - the file is no mapping
    except (OSError, SafetensorError) as error:
        raise InputError(f"{KEY}: {path} cannot be read ({error})") from error
    tensors = {key: t.float() if t.is_floating_point() else t for key, t in tensors.items()}
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{KEY}: {path} holds numbers that are not finite, in {key}")
    written = tables.value(header[METADATA], f"{KEY}: the header of {path}") if METADATA in header else {}
    if not isinstance(written, dict):
        raise InputError(f"{KEY}: the header of {path} holds {METADATA} that is no map")
    options: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in written.items():
        network, _, option = key.partition(".")
        options[network][option] = value
    if file.name == USUAL[1] and not written:
        beside = file.with_name(CONFIG)
        if not beside.is_file():
            raise InputError(f"{KEY}: {path} needs the {CONFIG} that peft writes beside it, for its alpha")
        options[""] = tables.document(beside)
        if not isinstance(options[""], dict) or options[""].get("peft_type") != "LORA":
            raise InputError(f"{KEY}: {beside} is not peft's configuration of a LoRA")
    return tensors, dict(options)


def _read_run(path: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Return the adapters of a run's last checkpoint (the average if there is one), and peft's options."""
    model = read_map(folder / "config.yaml").get("model")
    lora = model.get("lora") if isinstance(model, dict) else None
    if not isinstance(lora, dict):
        raise InputError(f"{KEY}: the run {path} trained every weight; export it and give the export as the model")
    last = checkpoint.find(folder / "checkpoints")
    checkpoint.check(last)
    tensors, _ = _read_file(path, last / checkpoint.WHOLE)
    averaged = {key: tensor for key, tensor in tensors.items() if key.startswith(AVERAGE)}
    tensors = {key.removeprefix(AVERAGE): tensor for key, tensor in (averaged or tensors).items()}
    tensors = {key: tensor for key, tensor in tensors.items() if ".lora_" in key and not key.startswith(OTHER_POLICIES)}
    if lora.get("path") is not None:
        begun, options = _read_file(path, folder / START)
        return tensors | {key: tensor for key, tensor in begun.items() if SHIFT.fullmatch(key)}, options
    return tensors, {"": {"lora_alpha": lora.get("alpha")}}
