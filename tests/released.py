"""Folders like those of released masked-diffusion models, without their size.

Each has the public config.json with smaller numbers, random weights under the released names in two shards, a tokenizer of
single characters, and remote code that no test may run.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NAMES = ("llada", "llada15", "dream", "llada2")
CHARACTERS = ["\n", *map(chr, range(32, 127))]
REMOTE = 'raise RuntimeError("the code of the folder ran")\n'
VOCABULARY = 112
END, MASK = 96, 97  # the ends of texts pad, too

LLADA = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 32,  # 4096
    "embedding_dropout": 0.0,
    "embedding_size": VOCABULARY,  # 126464
    "eos_token_id": END,  # 126081
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": MASK,  # 126336
    "max_sequence_length": 4096,
    "mlp_hidden_size": 48,  # 12288
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,  # 32
    "n_kv_heads": 4,  # 32
    "n_layers": 2,  # 32
    "pad_token_id": END,  # 126081
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": VOCABULARY,  # 126464
    "weight_tying": False,
}
DREAM = {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
    "bos_token_id": END,  # 151643
    "eos_token_id": END,  # 151643
    "hidden_act": "silu",
    "hidden_size": 32,  # 3584
    "initializer_range": 0.02,
    "intermediate_size": 48,  # 18944
    "mask_token_id": MASK,  # 151666
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "Dream",
    "num_attention_heads": 4,  # 28
    "num_hidden_layers": 2,  # 28
    "num_key_value_heads": 2,  # 4
    "pad_token_id": END,  # 151643
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.2",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,  # 152064
}
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "dtype": "bfloat16",
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 16,  # 128
    "hidden_act": "silu",
    "hidden_size": 32,  # 2048
    "initializer_range": 0.02,
    "intermediate_size": 48,  # 5120
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 12,  # 512
    "moe_router_enable_expert_bias": True,
    "n_group": 4,  # 8
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "num_attention_heads": 4,  # 16
    "num_experts": 16,  # 256
    "num_experts_per_tok": 3,  # 8
    "num_hidden_layers": 2,  # 20
    "num_key_value_heads": 2,  # 4
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": END,  # 156892
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 8,  # 64
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_group": 2,  # 4
    "transformers_version": "4.57.1",
    "use_bias": False,
    "use_cache": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
    "vocab_size": VOCABULARY,  # 157184
}
DREAM_GENERATION = {
    "_from_model_config": True,
    "alg": "origin",
    "alg_temp": None,
    "bos_token_id": END,
    "eos_token_id": END,
    "eps": 0.001,
    "mask_token_id": None,
    "output_history": False,
    "pad_token_id": END,
    "steps": 512,
    "top_k": None,
    "top_p": None,
    "transformers_version": "4.46.2",
}
CONFIGS = {"llada": LLADA, "llada15": LLADA, "dream": DREAM, "llada2": LLADA2}  # LLaDA-1.5's is LLaDA-8B-Instruct's


def released(name: str, folder: Path, **changed) -> Path:
    """The folder, with a model of one of `NAMES` in it.

    Args:
        changed: keys of its config.json with other values.
    """
    config = CONFIGS[name] | changed
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = DREAM_GENERATION if name == "dream" else {"eos_token_id": END, "pad_token_id": END}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    shapes = {"llada": llada_shapes, "Dream": dream_shapes, "llada2_moe": llada2_shapes}[config["model_type"]](config)
    state = random_state(shapes)
    save_torch_state_dict(state, folder, max_shard_size=4 * sum(t.numel() for t in state.values()) * 2 // 3)
    for file in {path.partition(".")[0] for path in config["auto_map"].values()}:
        (folder / f"{file}.py").write_text(REMOTE)
    (dream_tokenizer if config["model_type"] == "Dream" else tokenizer)(folder, name)
    return folder


def random_state(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Random weights whose predictions are far from even."""
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        if "norm" in name or name.endswith("ln_f.weight"):
            return 1 + 0.2 * drawn
        return (0.1 if len(shape) == 1 else 0.3) * drawn

    return {name: tensor(name, shape) for name, shape in shapes.items()}


def llada_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of LLaDA."""
    width, inner, rows = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kept = width // config["n_heads"] * config["n_kv_heads"]
    shapes = {"model.transformer.wte.weight": (rows, width), "model.transformer.ln_f.weight": (width,)}
    for i in range(config["n_layers"]):
        block = {
            "attn_norm": (width,), "ff_norm": (width,), "q_proj": (width, width), "k_proj": (kept, width),
            "v_proj": (kept, width), "attn_out": (width, width), "ff_proj": (inner, width), "up_proj": (inner, width),
            "ff_out": (width, inner),
        }  # fmt: skip
        shapes |= {f"model.transformer.blocks.{i}.{name}.weight": shape for name, shape in block.items()}
    return shapes if config["weight_tying"] else shapes | {"model.transformer.ff_out.weight": (rows, width)}


def dream_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of Dream."""
    width, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kept = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (rows, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (rows, width),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (width, width), "self_attn.q_proj.bias": (width,),
            "self_attn.k_proj.weight": (kept, width), "self_attn.k_proj.bias": (kept,),
            "self_attn.v_proj.weight": (kept, width), "self_attn.v_proj.bias": (kept,),
            "self_attn.o_proj.weight": (width, width), "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width), "mlp.down_proj.weight": (width, inner),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def llada2_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of LLaDA2."""
    width, head, rows = config["hidden_size"], config["head_dim"], config["vocab_size"]
    heads, kept = config["num_attention_heads"], config["num_key_value_heads"]
    experts = config["num_experts"]
    shapes = {
        "model.word_embeddings.weight": (rows, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (rows, width),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "attention.query_layernorm": (head,), "attention.key_layernorm": (head,),
            "attention.query_key_value": ((heads + 2 * kept) * head, width), "attention.dense": (width, heads * head),
        }  # fmt: skip
        if i < config["first_k_dense_replace"]:
            inner = {"mlp": config["intermediate_size"]}
        else:
            names = [*(f"mlp.experts.{e}" for e in range(experts)), "mlp.shared_experts"]
            inner = dict.fromkeys(names, config["moe_intermediate_size"])
            layer |= {"mlp.gate": (experts, width)}
            shapes[f"model.layers.{i}.mlp.gate.expert_bias"] = (experts,)
        for name, size in inner.items():
            layer |= {f"{name}.gate_proj": (size, width), f"{name}.up_proj": (size, width)}
            layer |= {f"{name}.down_proj": (width, size)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def tokenizer(folder: Path, name: str) -> None:
    """The files of a fast tokenizer; of LLaDA2 it names its mask token, of LLaDA only config.json does."""
    words = [*CHARACTERS, "<|endoftext|>", "<|mask|>", "<|startoftext|>", "<|start|>", "<|eot_id|>"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words[:96])}, unk_token="?"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    inner.add_special_tokens(words[96:])
    special = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": "<|startoftext|>"}
    if name == "llada2":
        special["mask_token"] = "<|mask|>"
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


TEMPLATE = (
    "{{bos_token}}{% for message in messages %}<|start|>{{message['role']}}\n{{message['content']}}<|eot_id|>"
    "{% endfor %}<|start|>assistant\n"
)


def dream_tokenizer(folder: Path, name: str) -> None:
    """The files of Dream's tokenizer, whose class is remote code: a byte-level vocabulary without merges."""
    bytes_of = {"\n": "Ċ", " ": "Ġ"}
    (folder / "vocab.json").write_text(
        json.dumps({bytes_of.get(c, c): i for i, c in enumerate(CHARACTERS)}, ensure_ascii=False), encoding="utf-8"
    )
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {END: "<|endoftext|>", MASK: "<|mask|>", 98: "<|beginoftext|>", 99: "<|im_start|>", 100: "<|im_end|>"}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    written = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {i: {"content": word, **flags} for i, word in added.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "chat_template": (
            "{% for message in messages %}<|im_start|>{{message['role']}}\n{{message['content']}}<|im_end|>\n"
            "{% endfor %}<|im_start|>assistant\n"
        ),
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=2))
    (folder / "tokenization_dream.py").write_text(REMOTE)
