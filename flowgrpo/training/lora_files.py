"""LoRA files of others and of ours, `model.lora.path`: found, read, and placed on the layers of networks.

What a file alone tells is refused here, before a model is loaded.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from flowgrpo.data import tables
from flowgrpo.data.yaml_maps import read_map
from flowgrpo.errors import InputError
from flowgrpo.schema.lazy import lazy
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training import checkpoint
from flowgrpo.training.adapters import METADATA, Adapter, Matrices, alpha_in
from flowgrpo.training.hub import HUB_ID, Shape, one_sentence
from flowgrpo.training.weights import AVERAGE, OTHER_POLICIES

if TYPE_CHECKING:
    import huggingface_hub
else:
    huggingface_hub = lazy("huggingface_hub")

KEY = "model.lora.path"
START = "start.safetensors"  # a run's own copy of what it started from
USUAL = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
CONFIG = "adapter_config.json"
MATRIX = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?:\.default)?\.(weight|bias)")
ROLES = {"A.weight": "down", "down.weight": "down", "B.weight": "up", "up.weight": "up", "B.bias": "bias"}
OTHERS = {
    **dict.fromkeys(("lora_magnitude_vector", "dora_scale"), "a DoRA"),
    **{
        "lokr_": "a LoKr",
        "hada_": "a LoHa",
        "oft_": "an OFT",
        "vera_lambda": "a VeRA",
        "lora_embedding": "a LoRA of embeddings",
    },
}
PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.", "")  # of peft, ComfyUI, diffusers
TEXT_ENCODERS = ("text_encoder", "lora_te", "text_model.", "conditioner.")


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """What was read.

    Attributes:
        place: what the user wrote.
        tensors: by the names in the file, those of text encoders left out.
        options: peft's options, by the name of a network; of all networks under "".
    """

    place: str
    tensors: Mapping[str, torch.Tensor]
    options: Mapping[str, Mapping[str, Any]]

    @property
    def size(self) -> int:
        """Number of weights of the adapters."""
        return sum(tensor.numel() for key, tensor in self.tensors.items() if not key.endswith(".alpha"))


def kept(settings: RunConfig, folder: Path) -> RunConfig:
    """The configuration of a run that has begun, with the run's own copy in place of the file that it started from.

    Raises:
        InputError: the copy is gone.
    """
    lora = settings.model.lora
    if lora is None or lora.path is None:
        return settings
    if not (folder / START).is_file():
        raise InputError(f"{folder}: {START} is missing, the copy of what the run started from")
    own = lora.model_copy(update={"path": str(folder / START)})
    return settings.model_copy(update={"model": settings.model.model_copy(update={"lora": own})})


def read(path: str) -> LoraFile:
    """The LoRA of a file, a folder (an export's or a run's, too) or a hub id, `owner/name` or `owner/name/file`.

    Raises:
        InputError: there is none, it cannot be read, or it is no LoRA whose adapters can be trained here.
    """
    file = _located(path)
    if file.is_dir():
        tensors, options = _of_run(path, file)
    else:
        tensors, options = _of_file(path, file)
    if not any("lora" in key for key in tensors) and not any(word in key for key in tensors for word in OTHERS):
        first = min(tensors, default="nothing")
        raise InputError(f"{KEY}: {path} is no LoRA, it holds {first}; weights of a whole model go to model.path")
    for key in sorted(tensors):
        for word, kind in OTHERS.items():
            if word in key:
                raise InputError(f"{KEY}: {path} is {kind} ({key}), only plain LoRA can be trained on")
    own = {key: tensor for key, tensor in tensors.items() if not key.startswith(TEXT_ENCODERS)}
    if not own:
        raise InputError(f"{KEY}: {path} has adapters for text encoders only ({min(tensors)}), which are not trained")
    if len(own) < len(tensors):
        warnings.warn(f"{KEY}: {path} has adapters for text encoders too, they are left out", stacklevel=2)
    return LoraFile(place=path, tensors=own, options=options)


def _located(path: str) -> Path:
    """The file that a path means, on this machine; the folder of a run."""
    here = Path(path)
    if here.is_file():
        return here
    if here.is_dir():
        if (here / "config.yaml").is_file():
            return here
        return here / _chosen(path, [file.name for file in here.iterdir()])
    parts = path.split("/")
    if len(parts) < 2 or here.is_absolute() or not re.fullmatch(HUB_ID, "/".join(parts[:2])):
        raise InputError(f"{KEY}: there is no file or folder {path!r}")
    name, inside = "/".join(parts[:2]), "/".join(parts[2:])
    with one_sentence(name, KEY):
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
            inside = inside or _chosen(path, [file.name for file in folder.iterdir()])
            return folder / inside
        inside = inside or _chosen(path, huggingface_hub.HfApi().list_repo_files(name))
        if inside.endswith(USUAL[1]):
            huggingface_hub.hf_hub_download(name, inside.removesuffix(USUAL[1]) + CONFIG)  # lies beside it then
        return Path(huggingface_hub.hf_hub_download(name, inside))


def _chosen(path: str, names: Iterable[str]) -> str:
    """The file of a folder that holds the LoRA."""
    found = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    for usual in USUAL:
        if usual in found:
            return usual
    if len(found) == 1:
        return found[0]
    if not found:
        raise InputError(f"{KEY}: {path} holds no .safetensors file and is no run's folder")
    raise InputError(f"{KEY}: {path} holds several files, name one of {', '.join(found[:8])}")


def _of_file(path: str, file: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors of a file, in float32, and peft's options in its header or beside it."""
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


def _of_run(path: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The adapters that evaluation used (the average, when one is kept) in the last checkpoint of a run."""
    model = read_map(folder / "config.yaml").get("model")
    lora = model.get("lora") if isinstance(model, dict) else None
    if not isinstance(lora, dict):
        raise InputError(f"{KEY}: the run {path} trained every weight; export it and set model.path to the export")
    found = checkpoint.find(folder / "checkpoints")
    checkpoint.check(found)
    tensors, _ = _of_file(path, found / "weights.safetensors")
    averaged = {key: tensor for key, tensor in tensors.items() if key.startswith(AVERAGE)}
    tensors = {key.removeprefix(AVERAGE): tensor for key, tensor in (averaged or tensors).items()}
    tensors = {key: tensor for key, tensor in tensors.items() if ".lora_" in key and not key.startswith(OTHER_POLICIES)}
    if lora.get("path") is not None:
        return tensors, _of_file(path, folder / START)[1]
    return tensors, {"": {"lora_alpha": lora.get("alpha")}}


def layers_of(file: LoraFile) -> dict[str, Matrices]:
    """The adapters of a file by the paths that it names.

    Raises:
        InputError: it holds something else, or half of an adapter.
    """
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    alphas: dict[str, float] = {}
    for key, tensor in file.tensors.items():
        if key.endswith(".alpha") and tensor.numel() == 1:
            alphas[key.removesuffix(".alpha")] = float(tensor)
            continue
        matrix = MATRIX.fullmatch(key)
        role = ROLES.get(f"{matrix[2].removeprefix('lora')[1:]}.{matrix[3]}") if matrix else None
        if role is None:
            raise InputError(f"{KEY}: {file.place} holds {key}, which is no matrix of a LoRA")
        found[matrix[1]][role] = tensor
    return {path: _matrices(file, path, roles, alphas.get(path)) for path, roles in found.items()}


def _matrices(file: LoraFile, path: str, roles: Mapping[str, torch.Tensor], alpha: float | None) -> Matrices:
    """The adapter of one layer; its alpha is the file's own, or that of peft's options."""
    if not roles.keys() >= {"down", "up"}:
        raise InputError(f"{KEY}: {file.place} has one matrix of the two for {path}")
    down, up = roles["down"], roles["up"]
    if down.ndim < 2 or up.ndim < 2 or up.shape[1] != len(down):
        raise InputError(f"{KEY}: {file.place} has matrices of different ranks for {path}")
    options, inside = _options(file, path)
    try:
        alpha = alpha or alpha_in(options, inside, len(down))
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise InputError(f"{KEY}: {file.place} has options that peft does not write ({error})") from error
    return Matrices(down=down, up=up, bias=roles.get("bias"), alpha=alpha)


def _options(file: LoraFile, path: str) -> tuple[Mapping[str, Any], str]:
    """peft's options for a path that a file names, and the path as their patterns mean it."""
    network, _, rest = path.partition(".")
    return (file.options[network], rest) if network in file.options else (file.options.get("", {}), path)


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
    for path, matrices in layers_of(file).items():
        root = _options(file, path)[0].get("use_rslora") is True
        found[f"{path}.alpha"] = torch.tensor(matrices.alpha * (matrices.rank**0.5 if root else 1.0))
    return found


def placed(
    file: LoraFile, layers: Mapping[str, Matrices], networks: Mapping[str, Mapping[str, Shape]], model: str
) -> dict[str, Adapter]:
    """The adapters by network, as far as a file has any.

    Paths may begin with the name of a network; those of the first with what peft, ComfyUI or nobody puts before them.

    Args:
        layers: of the file; see `layers_of`.
        networks: shapes of the weights of the layers of each, (out, in) or a convolution's.
        model: what the networks are called in errors.

    Raises:
        InputError: a path is not that of a layer, or a shape is another.
    """
    found: dict[str, dict[str, Matrices]] = defaultdict(dict)
    over_root: set[str] = set()  # networks whose alphas are over the root of the rank
    for path, matrices in layers.items():
        network, layer = _place(path, networks)
        if network is None:
            raise InputError(f"{KEY}: {file.place} has an adapter for {path}, and {model} has no such layer")
        written, has = (len(matrices.up), *matrices.down.shape[1:]), networks[network][layer]
        if written != has:
            raise InputError(
                f"{KEY}: {file.place} is of another model, its adapter of {path} is for a weight of "
                f"{' x '.join(map(str, written))}, in {model} it has {' x '.join(map(str, has))}"
            )
        found[network][layer] = matrices
        if _options(file, path)[0].get("use_rslora") is True:
            over_root.add(network)
    return {network: Adapter(own, network in over_root) for network, own in found.items()}


def _place(path: str, networks: Mapping[str, Mapping[str, Shape]]) -> tuple[str | None, str]:
    """The network and the layer that a path means."""
    first = next(iter(networks))
    prefixes = [*((f"{name}.", name) for name in networks), *((before, first) for before in PREFIXES)]
    for prefix, name in prefixes:
        layer = path.removeprefix(prefix)
        if path.startswith(prefix) and layer in networks[name]:
            return name, layer
    return None, path
