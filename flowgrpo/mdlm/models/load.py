"""Loading of a predictor and its tokenizer from a folder or a hub id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.data import embedded, tables
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.network.block_attention import Attention, find_block_size
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.model_files import folder_files, weight_check
from flowgrpo.training.model_files.hub_files import HUB_ID, file_names, one_sentence, without_progress_bars
from flowgrpo.training.weights import lora_adapters, quantisation
from rewards.base import nearest
from rewards.memory import is_out_of_memory
from rewards.models import hub

if TYPE_CHECKING:  # heavy modules are imported only when a model is loaded, not for a plan
    import peft
    import safetensors
    import transformers
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto import configuration_auto, modeling_auto

    from flowgrpo.mdlm.models import architectures
else:
    peft = lazy("peft")
    safetensors = lazy("safetensors")
    transformers = lazy("transformers")
    configuration_auto = lazy("transformers.models.auto.configuration_auto")
    modeling_auto = lazy("transformers.models.auto.modeling_auto")
    architectures = lazy("flowgrpo.mdlm.models.architectures")

PIPELINE = "LLaDA2Pipeline"  # the one pipeline class of diffusers that can be loaded
INDEX, PARTS = "model_index.json", {"model": "transformers", "tokenizer": None}  # its parts, and readers of weights
ADAPTER = "adapter_model.safetensors"
REMEDY = "a language model is the folder with its config.json, weights and tokenizer"


def load_predictor(
    path: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    trust_remote_code: bool = False,
    mask_id: int | None = None,
    shift: bool | None = None,
    attention: Attention | None = None,
    block_size: int | None = None,
    quantise: str | None = None,
    variant: str | None = None,
) -> tuple[MaskPredictor, PreTrainedTokenizerBase]:
    """Load a model as a predictor of masked tokens, and its tokenizer.

    Takes a built-in name, the released models of `mdlm.models.architectures`, masked or causal models of transformers, and
    local folders of diffusers' `LLaDA2Pipeline`. If `mask_id`, `shift`, `attention` or `block_size` is None, the value comes
    from the config, the tokenizer or the model's type.

    Args:
        trust_remote_code: allow the code that comes with a model, for types that are none of these.
        shift: output i predicts token i + 1.
        quantise: `int8` or `nf4`, before the model moves to the device.
        variant: word in the names of the weight files, such as `fp16`.

    Raises:
        InputError: there is no such model, its files are incomplete, its code is not allowed or fails, no mask token is
            known, it predicts no masked tokens, cannot be quantised, or does not have the attention asked for.
    """
    model_path, _ = model_paths(path)
    config = config_of(model_path)
    block_size = find_block_size(config, attention, block_size)
    check_weights(path, variant)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    known = architectures.architecture(config)
    with _one_sentence(path, "no readable weights", config, trust_remote_code), without_progress_bars("transformers"):
        if known:
            model = architectures.load(path, model_path, config, dtype, variant=variant)
        else:
            kind = _model_class(path, config, trust_remote_code)
            options = {"dtype": dtype, "variant": variant, "trust_remote_code": trust_remote_code}
            with weight_check.silent("transformers"):
                model, info = kind.from_pretrained(model_path, output_loading_info=True, **options)
            weight_check.refuse(weight_check.compare_loaded(info, model), type(model).__name__, path)
    if quantise:
        quantisation.quantise(model, quantise)
    if mask_id is None:
        mask_id = config.get("mask_token_id")
    if mask_id is None:
        mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise InputError(f"model.mask_id: {path!r} names no mask token, give its number")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else config.get("pad_token_id")
    if shift is None:
        shift = bool(known and known.shift)
    with _one_sentence(path, None, config, trust_remote_code):
        return MaskPredictor(model.to(device).eval(), mask_id, pad_id, shift=shift, block_size=block_size), tokenizer


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model without its weights; raise InputError if it has none, or its code is not allowed."""
    model_path, place = model_paths(path)
    config = config_of(model_path)
    with _one_sentence(path, "no tokenizer", config, trust_remote_code):
        if known := architectures.architecture(config):
            return known.tokenizer.from_pretrained(place)
        _model_class(path, config, trust_remote_code)  # raises if its code is not allowed
        return transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)


def load_positions(path: str, *, trust_remote_code: bool = False) -> int | None:
    """Return the most tokens of a prompt with its answer; None if the model's config has no such number."""
    place, _ = model_paths(path)
    written = config_of(place)
    if architectures.architecture(written):
        config = architectures.build_config(path, written)
    else:
        with _one_sentence(path, None, written, trust_remote_code):
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    return getattr(config, "max_position_embeddings", None)


def model_paths(path: str) -> tuple[str, str]:
    """Return the places of a model and its tokenizer: twice one folder or hub id, or two subfolders of a pipeline.

    Raises InputError if there is no model, or it is a flow model.
    """
    if path in EMBEDDED and EMBEDDED[path].kind == "flow":
        raise InputError(f"model.path: {path} is a flow model, not a language model: its runs have kind: flow")
    place = embedded.place_of(path)
    folder_files.refuse_file(place, REMEDY)
    if path not in EMBEDDED and "/" not in path and not Path(path).is_dir():
        raise InputError(
            f"model.path: there is no folder {path!r} and no built-in model of that name, "
            f"{nearest(path, embedded.names('mdlm'))}"
        )
    if Path(place).is_dir():
        _refuse_others(path, Path(place))
    model_path, tokenizer_path = (f"{place}/model", f"{place}/tokenizer") if is_pipeline(place) else (place, place)
    if Path(model_path).is_dir():
        folder_files.refuse_pointer(Path(model_path) / "config.json")
    try:
        config = config_of(model_path)
    except Exception as error:  # the file may hold anything
        reason = _hub_reason(path, error)
        raise InputError(f"model.path: {path!r} {reason or f'holds no model ({_reason(error)})'}") from error
    # Where there is no config.json, transformers gives an empty map.
    if not config or not isinstance(config, dict) or not isinstance(config.get("model_type", ""), str):
        raise InputError(f"model.path: {path!r} holds no model, or its config.json is not a map with a model_type")
    return model_path, tokenizer_path


def _refuse_others(path: str, folder: Path) -> None:
    """Raise InputError for a folder that is empty, or holds a pipeline or network other than a language model."""
    folder_files.refuse_non_model(folder)
    folder_files.refuse_pointer(folder / INDEX)
    if is_pipeline(str(folder)):
        folder_files.refuse_missing(folder, PARTS)
    elif (folder / INDEX).is_file() and not (folder / "config.json").is_file():
        raise InputError(f"model.path: {path} is the folder of a pipeline; for a flow model set kind: flow")
    elif folder_files.is_network(folder):
        raise InputError(
            f"model.path: {path} is a network of a pipeline alone, not a language model; {folder_files.REMEDY}"
        )


def check_files(path: str, variant: str | None = None, *, or_configs: bool = False) -> None:
    """Raise InputError for a local folder with missing or truncated files, or Git LFS pointers; no weights are loaded.

    For a hub id only the existence of the `variant` is checked. With `or_configs` the folder may hold no weights.
    """
    place = Path(model_paths(path)[0])
    if not Path(embedded.place_of(path)).is_dir():
        if variant is not None:
            with one_sentence(path):
                folder_files.refuse_absent(path, variant, [file_names(path)])
        return
    pipeline = is_pipeline(embedded.place_of(path))
    folder, components = (place.parent, PARTS) if pipeline else (place, {"": "transformers"})
    folder_files.check(folder, components, variant=variant, or_configs=or_configs)


def config_of(place: str) -> dict[str, Any]:
    """Return the config.json of a folder or hub id; {} if there is none."""
    with hub.cache_if_unreachable(place):
        return transformers.PreTrainedConfig.get_config_dict(place)[0]


def block_size_of(path: str, attention: Attention | None, block_size: int | None) -> int | None:
    """Return the tokens of a block of a model that is not loaded, None for full attention; see `load_predictor`."""
    return find_block_size(config_of(model_paths(path)[0]), attention, block_size)


def is_pipeline(path: str) -> bool:
    """Return whether a local folder is that of diffusers' `LLaDA2Pipeline`."""
    index = Path(path) / INDEX
    written = tables.document(index) if index.is_file() else None
    return isinstance(written, dict) and written.get("_class_name") == PIPELINE


def load_adapter(predictor: MaskPredictor, folder: Path) -> None:
    """Load an adapter that `flowgrpo export` wrote; raise InputError if it is an adapter of another model."""
    config = peft.PeftConfig.from_pretrained(str(folder))
    with safetensors.safe_open(folder / ADAPTER, "pt") as file:
        released = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in file.keys()}  # noqa: SIM118
    paths = architectures.own_paths(predictor.model, released)
    if paths:
        config = lora_adapters.rename_layers(config, paths)
    names = {f"^{re.escape(path)}\\.": f"{here}." for path, here in paths.items()}
    try:
        peft.PeftModel.from_pretrained(predictor.model, str(folder), config=config, key_mapping=names)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"--adapter {folder}: not of this model ({str(error).splitlines()[0]})") from error


@contextmanager
def _one_sentence(path: str, lacks: str | None, config: dict[str, Any], trust_remote_code: bool) -> Iterator[None]:
    """Turn errors of a model's own code, or of incomplete files, into an InputError of one sentence."""
    try:
        with hub.cache_if_unreachable(embedded.place_of(path)):
            yield
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = _reason(error)
        remote = trust_remote_code and config.get("auto_map") and architectures.architecture(config) is None
        if remote:  # this code may raise anything
            raise InputError(
                f"model.path: {path!r} is a {config.get('model_type')}, whose own code is of transformers "
                f"{config.get('transformers_version', '(no version named)')} and fails with {transformers.__version__} "
                f"({type(error).__name__}: {reason})"
            ) from error
        if reason_of_hub := _hub_reason(path, error):
            raise InputError(f"model.path: {path!r} {reason_of_hub}") from error
        if lacks:
            raise InputError(f"model.path: {path!r} has {lacks} ({type(error).__name__}: {reason})") from error
        raise


def _hub_reason(path: str, error: Exception) -> str | None:
    """Return why the hub did not give a model; None if the path is not a hub id or the error has another cause."""
    from_hub = re.fullmatch(HUB_ID, path) and not Path(path).is_dir()
    return hub.explain_failure(error, path, "set model.path to a folder") if from_hub else None


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def check_weights(path: str, variant: str | None = None, *, or_configs: bool = False) -> None:
    """Raise InputError for a model with incomplete files or missing weights; only the headers of files are read.

    A model with its own code is checked when it is loaded. For the arguments see `check_files`.
    """
    check_files(path, variant, or_configs=or_configs)
    place, _ = model_paths(path)
    written = config_of(place)
    if path in EMBEDDED:
        return
    if architectures.architecture(written) is not None:
        architectures.check_weights(path, place, written, variant)
    elif (kind := _known_class(written)) is not None and not written.get("auto_map"):
        weight_check.check(path, place, kind, variant=variant)


def _model_class(path: str, config: dict[str, Any], trust_remote_code: bool) -> Any:
    kind, remote = config.get("model_type"), config.get("auto_map", {})
    if kind in configuration_auto.CONFIG_MAPPING and not (trust_remote_code and remote):
        known = _known_class(config)
        if known is None:
            raise InputError(f"model.path: {path!r} is a {kind}, which predicts no tokens")
        return known
    if not remote:
        raise InputError(f"model.path: {path!r} is a {kind}, which transformers does not know")
    if not trust_remote_code:
        raise InputError(f"model.path: {path!r} brings its own code, set model.trust_remote_code if you trust it")
    return transformers.AutoModelForCausalLM if "AutoModelForCausalLM" in remote else transformers.AutoModel


def _known_class(config: dict[str, Any]) -> Any:
    """Return the transformers class that predicts tokens for the type in a config.json; None if there is none."""
    if config.get("model_type") not in configuration_auto.CONFIG_MAPPING:
        return None
    kind = configuration_auto.CONFIG_MAPPING[config["model_type"]]
    heads = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING)
    return next((mapping[kind] for mapping in heads if kind in mapping), None)
