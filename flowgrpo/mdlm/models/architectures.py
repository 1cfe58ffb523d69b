"""Released masked-diffusion models with their own code, loaded as equivalent classes of transformers.

A table of model types gives the class, its config, and the renaming of weights. The released code never runs;
checkpoints are saved under the released names. Logits equal those of the released code in float32. In bfloat16 they
differ a little: the classes of transformers rotate queries and keys in bfloat16, LLaDA's own code in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Split, WeightConverter, WeightRenaming, apply_renamings

from flowgrpo.errors import InputError
from flowgrpo.mdlm.models.released_names import is_released
from flowgrpo.training.model_files import weight_check

Written = Mapping[str, Any]  # a config.json

BESIDE = ("*.py", "*.json", "*.txt", "*.jinja", "*.model", "LICENSE*")  # files beside the weights
INDEX = "*.index*.json"


class LLaDA(LlamaForCausalLM):
    """LLaDA-8B and LLaDA-1.5 (arXiv 2502.09992, 2505.19223): a Llama whose weights have OLMo's names."""


class LLaDA2(Glm4MoeForCausalLM):
    """LLaDA2.x mini and flash (arXiv 2512.15745): a Glm4Moe with normed queries and keys; its files fuse q, k and v."""


class LLaDA2Config(Glm4MoeConfig):
    """A Glm4Moe config with its own model type: for `glm4_moe`, peft mistakes the dense `gate_proj` for stacked experts."""

    model_type = "llada2_moe"


class SDARMoe(Qwen3MoeForCausalLM):
    """SDAR with experts (arXiv 2510.06303): a Qwen3Moe."""


class SDARMoeConfig(Qwen3MoeConfig):
    """A Qwen3Moe config with its own model type, for the same reason as `LLaDA2Config`."""

    model_type = "sdar_moe"


register_checkpoint_conversion_mapping(
    "LLaDA",
    [
        WeightRenaming(r"^model\.transformer\.ff_out\.", "lm_head."),
        WeightRenaming(r"^model\.transformer\.wte\.", "model.embed_tokens."),
        WeightRenaming(r"^model\.transformer\.ln_f\.", "model.norm."),
        WeightRenaming(r"^model\.transformer\.blocks\.", "model.layers."),
        WeightRenaming(r"\.attn_norm\.", ".input_layernorm."),
        *[WeightRenaming(rf"\.{name}\.", f".self_attn.{name}.") for name in ("q_proj", "k_proj", "v_proj")],
        WeightRenaming(r"\.attn_out\.", ".self_attn.o_proj."),
        WeightRenaming(r"\.ff_norm\.", ".post_attention_layernorm."),
        WeightRenaming(r"\.ff_proj\.", ".mlp.gate_proj."),
        WeightRenaming(r"\.up_proj\.", ".mlp.up_proj."),
        WeightRenaming(r"\.ff_out\.", ".mlp.down_proj."),
    ],
)
register_checkpoint_conversion_mapping("SDARMoe", get_checkpoint_conversion_mapping("qwen3_moe"))
register_checkpoint_conversion_mapping(
    "LLaDA2",
    [
        *get_checkpoint_conversion_mapping("glm4_moe"),  # stacks the experts
        WeightRenaming(r"^model\.word_embeddings\.", "model.embed_tokens."),
        WeightRenaming(r"\.attention\.", ".self_attn."),
        WeightRenaming(r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        WeightRenaming(r"\.query_layernorm\.", ".q_norm."),
        WeightRenaming(r"\.key_layernorm\.", ".k_norm."),
        WeightRenaming(r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
        WeightConverter("query_key_value.weight", ["q_proj.weight", "k_proj.weight", "v_proj.weight"], [Split()]),
    ],
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A released model type, and how its config.json maps to transformers."""

    model: type[PreTrainedModel]  # the equivalent class of transformers
    config: Callable[[Written], PreTrainedConfig]  # builds that class's config from a config.json
    read: str  # required keys of config.json
    # Values that the class supports, by key; None means that the key may be absent. Other values are refused.
    fixed: Mapping[str, tuple[Any, ...]]
    inert: str  # further known keys, which change no logits or repeat other keys
    # Class of the tokenizer. Dream, SDAR and Fast-dLLM v2 take Qwen2's.
    tokenizer: type[PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    shift: bool = False  # output i predicts token i + 1


def _llada(written: Written) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=written.get("embedding_size") or written["vocab_size"],
        hidden_size=written["d_model"],
        intermediate_size=written.get("mlp_hidden_size") or written["mlp_ratio"] * written["d_model"],
        num_hidden_layers=written["n_layers"],
        num_attention_heads=written["n_heads"],
        num_key_value_heads=written.get("n_kv_heads") or written["n_heads"],
        max_position_embeddings=written["max_sequence_length"],
        rms_norm_eps=written["rms_norm_eps"],
        rope_parameters=_rope(written),
        tie_word_embeddings=written["weight_tying"],
        mask_token_id=written.get("mask_token_id"),
    )


def _qwen(kind: type[PreTrainedConfig], written: Written, names: str = "") -> PreTrainedConfig:
    return kind(**_shared(written, names), rope_parameters=_rope(written))


def _llada2(written: Written) -> PreTrainedConfig:
    names = "head_dim moe_intermediate_size first_k_dense_replace num_experts_per_tok n_group topk_group"
    return LLaDA2Config(
        **_shared(written, names),
        n_routed_experts=written["num_experts"],
        n_shared_experts=written["num_shared_experts"],
        norm_topk_prob=written["num_experts_per_tok"] > 1,  # the released router ignores the key norm_topk_prob
        routed_scaling_factor=written["routed_scaling_factor"],
        rope_parameters={**_rope(written), "partial_rotary_factor": written["partial_rotary_factor"]},
        use_qk_norm=True,
        num_mtp_layers=0,
    )


def _rope(written: Written) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": written["rope_theta"]}


def _shared(written: Written, names: str) -> dict[str, Any]:
    """Return the keys that all types but LLaDA share with transformers, and the keys in `names`."""
    return {name: written[name] for name in f"{SHARED} {names}".split()} | {
        "mask_token_id": written.get("mask_token_id")
    }


SHARED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    " max_position_embeddings rms_norm_eps tie_word_embeddings"
)
INERT = (  # keys that change no logits of any type; dropout is never on, since a model is trained in evaluation mode
    "auto_map torch_dtype attn_implementation use_cache initializer_range bos_token_id eos_token_id pad_token_id"
    " mask_token_id output_router_logits max_window_layers sliding_window attention_dropout embedding_dropout"
    " residual_dropout output_dropout"
)
MOE = (
    "head_dim moe_intermediate_size num_experts num_experts_per_tok norm_topk_prob"  # further keys of SDAR with experts
)
OFF = (False, None)
QWEN = {"hidden_act": ("silu",), "rope_scaling": (None,), "use_sliding_window": OFF, "attention_bias": OFF}
ARCHITECTURES = {
    "llada": Architecture(
        model=LLaDA,
        config=_llada,
        read="vocab_size d_model n_layers n_heads max_sequence_length rms_norm_eps rope_theta weight_tying",
        fixed={
            "activation_type": ("silu",),
            "block_type": ("llama",),
            "block_group_size": (1, None),
            "layer_norm_type": ("rms",),
            "layer_norm_with_affine": (True, None),
            "rope": (True,),
            "multi_query_attention": OFF,
        }
        | dict.fromkeys(
            ("alibi", "attention_layer_norm", "bias_for_layer_norm", "include_bias", "include_qkv_bias"), OFF
        )
        | dict.fromkeys(("input_emb_norm", "scale_logits"), OFF),
        inert="embedding_size mlp_hidden_size mlp_ratio n_kv_heads alibi_bias_max attention_layer_norm_with_affine precision"
        " flash_attention flash_attn_varlen rope_full_precision init_cutoff_factor init_device init_fn init_std",
    ),
    "Dream": Architecture(
        model=Qwen2ForCausalLM,
        config=partial(_qwen, Qwen2Config),
        read=f"{SHARED} rope_theta",
        fixed=QWEN | {"use_mrope": OFF},
        inert="",
        tokenizer=Qwen2Tokenizer,
        shift=True,
    ),
    "sdar": Architecture(  # SDAR, arXiv 2510.06303, and TraDo, arXiv 2509.06949
        model=Qwen3ForCausalLM,
        config=partial(_qwen, Qwen3Config, names="head_dim"),
        read=f"{SHARED} rope_theta head_dim",
        fixed=QWEN,
        inert="block_size debug ep_size fuse_cross_entropy micro_forward skip_checkpoint use_deepep",
        tokenizer=Qwen2Tokenizer,
    ),
    "sdar_moe": Architecture(
        model=SDARMoe,
        config=partial(_qwen, SDARMoeConfig, names=MOE),
        read=f"{SHARED} rope_theta {MOE}",
        fixed=QWEN | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        inert="block_size router_aux_loss_coef",
        tokenizer=Qwen2Tokenizer,
    ),
    "Fast_dLLM_Qwen": Architecture(  # Fast-dLLM v2, arXiv 2509.26328
        model=Qwen2ForCausalLM,
        config=partial(_qwen, Qwen2Config),
        read=f"{SHARED} rope_theta",
        fixed=QWEN,
        inert="bd_size layer_types",
        tokenizer=Qwen2Tokenizer,
        shift=True,
    ),
    "llada2_moe": Architecture(
        model=LLaDA2,
        config=_llada2,
        read=f"{SHARED} rope_theta head_dim partial_rotary_factor moe_intermediate_size first_k_dense_replace num_experts"
        " num_shared_experts num_experts_per_tok n_group topk_group routed_scaling_factor",
        fixed={
            "hidden_act": ("silu",),
            "rope_scaling": (None,),
            "score_function": ("sigmoid", None),
            "moe_router_enable_expert_bias": (True, None),
            "use_rmsnorm": (True, None),
            "use_qk_norm": (True, None),
            "use_bias": (False,),
        }
        | dict.fromkeys(("use_qkv_bias", "norm_head", "norm_softmax", "use_sliding_window"), OFF)
        | {"using_split_qkv_in_self_attention": OFF},
        inert="norm_topk_prob rotary_dim router_dtype block_length",
    ),
}


def architecture(written: Written) -> Architecture | None:
    """Return the architecture of a config.json; None if its type is not in the table."""
    return ARCHITECTURES[written["model_type"]] if is_released(written) else None


def build_config(path: str, written: Written) -> PreTrainedConfig:
    """Build the transformers config of the model `path`; raise InputError for missing, unknown or unsupported keys."""
    kind = written["model_type"]
    known = ARCHITECTURES[kind]
    for key in known.read.split():
        if written.get(key) is None:
            raise InputError(f"model.path: config.json of {path!r} has no {key}, which every {kind} has")
    for key, values in known.fixed.items():
        if written.get(key) not in values:
            said = f"says {key}: {json.dumps(written[key])}" if key in written else f"has no {key}"
            raise InputError(
                f"model.path: config.json of {path!r} {said}, a {kind} is known with {json.dumps(values[0])}"
            )
    keys = {*known.read.split(), *known.fixed, *known.inert.split(), *INERT.split(), *PreTrainedConfig().to_dict()}
    for key, value in written.items():
        if key not in keys and value not in OFF and not key.startswith("_"):
            raise InputError(
                f"model.path: config.json of {path!r} says {key}: {json.dumps(value)}, which is not known of a {kind}"
            )
    try:
        return known.config(written)
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"model.path: config.json of {path!r} is not of a {kind} ({reason})") from error


def load(path: str, place: str, written: Written, dtype: torch.dtype, *, variant: str | None = None) -> PreTrainedModel:
    """Load the model `path` from `place`, its folder or hub id; raise InputError if config or weights do not fit."""
    config, kind = build_config(path, written), ARCHITECTURES[written["model_type"]].model
    with weight_check.silent("transformers"):
        return kind.from_pretrained(place, config=config, dtype=dtype, variant=variant)


def check_weights(path: str, place: str, written: Written, variant: str | None = None) -> None:
    """Raise InputError if the headers of a model's files show that weights of its type are missing or extra; see `load`."""
    config, kind = build_config(path, written), ARCHITECTURES[written["model_type"]].model
    weight_check.check(path, place, kind, variant=variant, config=config, all_used=True)


def shapes(path: str, place: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by their transformers names, from the config.json of a folder or hub id."""
    written, _ = PreTrainedConfig.get_config_dict(place)
    config = build_config(path, written)
    with torch.device("meta"):
        model = ARCHITECTURES[written["model_type"]].model(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def copy_beside(place: str, to: Path, dtype: torch.dtype) -> None:
    """Copy the files of a folder or hub id except weights: tokenizer, code, and config.json with another dtype."""
    if not Path(place).is_dir():
        place = snapshot_download(place, allow_patterns=list(BESIDE), ignore_patterns=[INDEX])
    files = {file for pattern in BESIDE for file in Path(place).glob(pattern)} - set(Path(place).glob(INDEX))
    for file in files:
        shutil.copy(file, to / file.name)
    written = json.loads((to / "config.json").read_text())
    named = {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in written}
    (to / "config.json").write_text(json.dumps(written | named, indent=2) + "\n")


def released_paths(model: PreTrainedModel, paths: Iterable[str]) -> dict[str, str]:
    """Map module paths to those of the released code; {} if one is only part of a fused module there (q, k, v)."""
    conversions = [c.reverse_transform() for c in reversed(_conversions(model))]
    parts = [c for c in conversions if isinstance(c, WeightConverter)]
    if any(part.rename_source_key(f"{path}.weight")[1] for part in parts for path in paths):
        return {}
    return _renamed(paths, conversions)


def own_paths(model: PreTrainedModel, paths: Iterable[str]) -> dict[str, str]:
    """Map module paths to those of `model`: paths of the released code are translated, paths of `model` stay as they are."""
    there = {path for path, _ in model.named_modules()}
    return {path: path if path in there else here for path, here in _renamed(paths, _conversions(model)).items()}


def _conversions(model: PreTrainedModel) -> list[WeightRenaming | WeightConverter]:
    return get_checkpoint_conversion_mapping(type(model).__name__) or []


def _renamed(paths: Iterable[str], conversions: Sequence[WeightRenaming | WeightConverter]) -> dict[str, str]:
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    return {path: apply_renamings(f"{path}.weight", renamings).removesuffix(".weight") for path in paths}
