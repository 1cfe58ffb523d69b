"""Folders like those of released masked-diffusion models, without their size.

Each has the public config.json with smaller numbers, random weights under the released names in two shards, a tokenizer of
single characters, and remote code that no test may run.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from released_configs import CONFIGS, DREAM_GENERATION, END, MASK
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NAMES = ("llada", "llada15", "dream", "llada2")
BLOCKWISE = ("sdar", "sdar_moe")  # released models that attend in blocks, as llada2 does
CHARACTERS = ["\n", *map(chr, range(32, 127))]
REMOTE = 'raise RuntimeError("the code of the folder ran")\n'


def released(name: str, folder: Path, **changed) -> Path:
    """Write a model of one of `NAMES` or `BLOCKWISE`, with `changed` keys of its config.json."""
    config = CONFIGS[name] | changed
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = DREAM_GENERATION if name == "dream" else {"eos_token_id": END, "pad_token_id": END}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    state = random_state(SHAPES[config["model_type"]](config))
    save_torch_state_dict(state, folder, max_shard_size=4 * sum(t.numel() for t in state.values()) * 2 // 3)
    for file in {path.partition(".")[0] for path in config["auto_map"].values()}:
        (folder / f"{file}.py").write_text(REMOTE)
    if name in ("dream", *BLOCKWISE):
        qwen_tokenizer(folder, name)
    else:
        tokenizer(folder, name)
    return folder


def random_state(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Draw weights whose predictions are far from even."""
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        if "norm" in name or name.endswith("ln_f.weight"):
            return 1 + 0.2 * drawn
        return (0.1 if len(shape) == 1 else 0.3) * drawn

    return {name: tensor(name, shape) for name, shape in shapes.items()}


def llada_shapes(config: dict) -> dict[str, tuple[int, ...]]:
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


def qwen_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name the weights of Dream, whose projections have biases, and SDAR, whose projections have norms."""
    width, rows, biased = config["hidden_size"], config["vocab_size"], config["model_type"] == "Dream"
    head = width // config["num_attention_heads"] if biased else config["head_dim"]
    seen, kept = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (rows, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (rows, width),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
        for part, size in {"q": seen, "k": kept, "v": kept}.items():
            layer[f"self_attn.{part}_proj.weight"] = (size, width)
            if biased:
                layer[f"self_attn.{part}_proj.bias"] = (size,)
            elif part != "v":
                layer[f"self_attn.{part}_norm.weight"] = (head,)
        layer["self_attn.o_proj.weight"] = (width, seen)
        inner = {"mlp": config["intermediate_size"]}
        if "num_experts" in config:
            inner = {f"mlp.experts.{e}": config["moe_intermediate_size"] for e in range(config["num_experts"])}
            layer["mlp.gate.weight"] = (config["num_experts"], width)
        for name, size in inner.items():
            layer |= {f"{name}.gate_proj.weight": (size, width), f"{name}.up_proj.weight": (size, width)}
            layer |= {f"{name}.down_proj.weight": (width, size)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def llada2_shapes(config: dict) -> dict[str, tuple[int, ...]]:
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


SHAPES = {
    "llada": llada_shapes,
    "Dream": qwen_shapes,
    "sdar": qwen_shapes,
    "sdar_moe": qwen_shapes,
    "llada2_moe": llada2_shapes,
}


def tokenizer(folder: Path, name: str) -> None:
    """Write a fast tokenizer; LLaDA2's names its mask token, LLaDA's does not."""
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
    file = folder / "tokenizer_config.json"
    written = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(written, indent=2))


TEMPLATE = (
    "{{bos_token}}{% for message in messages %}<|start|>{{message['role']}}\n{{message['content']}}<|eot_id|>"
    "{% endfor %}<|start|>assistant\n"
)


def qwen_tokenizer(folder: Path, name: str) -> None:
    """Write Dream's or SDAR's tokenizer, whose class is remote code: a byte-level vocabulary without merges."""
    file, own = ("tokenization_dream", "Dream") if name == "dream" else ("tokenization_qwen2", "Qwen2")
    bytes_of = {"\n": "Ċ", " ": "Ġ"}
    (folder / "vocab.json").write_text(
        json.dumps({bytes_of.get(c, c): i for i, c in enumerate(CHARACTERS)}, ensure_ascii=False), encoding="utf-8"
    )
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {END: "<|endoftext|>", MASK: "<|mask|>", 98: "<|beginoftext|>", 99: "<|im_start|>", 100: "<|im_end|>"}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    template = (
        "{% for message in messages %}<|im_start|>{{message['role']}}\n{{message['content']}}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    )
    written = {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": "<|beginoftext|>", "chat_template": template,
        "added_tokens_decoder": {i: {"content": word, **flags} for i, word in added.items()},
        "auto_map": {"AutoTokenizer": [f"{file}.{own}Tokenizer", None]}, "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>", "pad_token": "<|endoftext|>", "tokenizer_class": f"{own}Tokenizer", "unk_token": None,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=2))
    (folder / f"{file}.py").write_text(REMOTE)
