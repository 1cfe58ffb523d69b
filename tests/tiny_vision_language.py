"""Tiny vision-language models with a reward head, in the files and under the names that their authors released.

The weights follow from their names, so that another program with another version of transformers can make them too.
"""

import json
import math
import re
import zlib

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModel

WIDTH, RANK = 32, 2
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
SPLIT = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
SYSTEM = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"  # which Qwen2-VL puts first, and Qwen3-VL does not
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
IDS = {token: len(ALPHABET) + i for i, token in enumerate(SPECIAL)}
WORDS = len(ALPHABET) + len(SPECIAL)


def save_base(folder, kind, whole_words=False):
    """Save the config, tokenizer and processor of a tiny `qwen2_vl` or `qwen3_vl`.

    A token is a byte; with `whole_words` it is a word, most of which are unknown, which makes texts short, and there is one
    layer in place of two.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = {letter: i for i, letter in enumerate(ALPHABET)}
    if whole_words:
        inner = Tokenizer(models.WordLevel(alphabet, unk_token="a"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        inner = Tokenizer(models.BPE(alphabet, []))
        inner.normalizer, inner.decoder = normalizers.NFC(), decoders.ByteLevel()
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(alphabet))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    new = kind == "qwen3_vl"
    pixels = {"min_pixels": 3136, "max_pixels": 12_845_056}
    if new:
        size = {"longest_edge": 16_777_216, "shortest_edge": 65_536}
        pixels = {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    files = {
        "config.json": (qwen3_vl_config if new else qwen2_vl_config)(1 if whole_words else 2),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast" if whole_words else "Qwen2Tokenizer", "model_max_length": 100_000,
            "pad_token": SPECIAL[0], "eos_token": SPECIAL[2], "padding_side": "left",
        },
        "preprocessor_config.json": {
            "processor_class": "Qwen3VLProcessor" if new else "Qwen2VLProcessor", **pixels,
            "image_processor_type": "Qwen2VLImageProcessorFast" if new else "Qwen2VLImageProcessor",
            "patch_size": 16 if new else 14, "temporal_patch_size": 2, "merge_size": 2,
        },
        "chat_template.json": {"chat_template": TEMPLATE if new else SYSTEM + TEMPLATE},
    }  # fmt: skip
    if new:
        video = {
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"longest_edge": 9**8, "shortest_edge": 4096},
        }
        files["video_preprocessor_config.json"] = {"video_processor_type": "Qwen3VLVideoProcessor", **video}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def qwen2_vl_config(layers):
    vision = {
        "depth": layers, "embed_dim": 32, "hidden_size": WIDTH, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3,
        "patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_size": WIDTH,
        "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": WORDS + 9, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "bos_token_id": IDS[SPECIAL[0]], "eos_token_id": IDS[SPECIAL[2]],
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "tie_word_embeddings": True,
        "use_sliding_window": False,
        "image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"], "vision_end_token_id": IDS["<|vision_end|>"],
        "vision_config": vision,
    }  # fmt: skip


def qwen3_vl_config(layers):
    text = {
        "model_type": "qwen3_vl_text", "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": WORDS + 9, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "rope_theta": 5e6,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl", "depth": layers, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": WIDTH, "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "in_channels": 3,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text,
        "vision_config": vision, "tie_word_embeddings": False, "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"], "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
    }  # fmt: skip


def value(name, shape):
    """Return the weights of a name in a released checkpoint, without PEFT's prefix: normal, of a seed from the name."""
    name = name.replace("lm_head", "model.embed_tokens")  # as those of Qwen2-VL 2B, which are one
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if len(shape) == 1:
        norm = name.endswith("weight")
        return 1 + 0.1 * drawn if norm else 0.1 * drawn
    return drawn if "embed" in name and "patch" not in name else drawn / math.sqrt(math.prod(shape[1:]))


def weights(base, heads, adapted=False):
    """Return the weights of a checkpoint as released, of the model in the folder `base` and heads of these shapes."""
    added = 3 if "rm_head.weight" in heads else 1
    config = AutoConfig.from_pretrained(base)
    config.text_config.vocab_size = WORDS + added
    shapes = {name: tuple(value.shape) for name, value in AutoModel.from_config(config).state_dict().items()}
    if config.model_type == "qwen3_vl":
        shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    else:
        shapes = {name.replace("language_model.", "model."): shape for name, shape in shapes.items()}
    shapes |= {**heads, "lm_head.weight": (WORDS + added, WIDTH)}
    if adapted:
        shapes = dict(part for name, shape in shapes.items() for part in adapter(name, shape))
    start = "base_model.model." if adapted else ""
    return {start + name: value(name, shape) for name, shape in shapes.items()}


def adapter(name, shape):
    """Return the names and shapes that PEFT has for a weight, with LoRA on the linear layers of the language model."""
    layer, _, kind = name.rpartition(".")
    if not re.fullmatch(r"model\.layers\..*_proj", layer):
        return [(name, shape)]
    base = (f"{layer}.base_layer.{kind}", shape)
    if kind == "bias":
        return [base]
    out, into = shape
    return [base, (f"{layer}.lora_A.default.weight", (RANK, into)), (f"{layer}.lora_B.default.weight", (out, RANK))]


def ranknet(width=WIDTH):
    sizes = {0: (1024, width), 3: (16, 1024), 5: (2, 16)}
    return {f"rm_head.{i}.{kind}": size[:n] for i, size in sizes.items() for kind, n in (("weight", 2), ("bias", 1))}


def conditioned(width=8):
    sizes = {
        "cond_encoder.0": (width, 2), "cond_encoder.2": (width, width), "film_gen.0": (WIDTH, width),
        "film_gen.2": (2 * WIDTH, WIDTH), "cap_encoder.proj": (width, WIDTH), "cap_encoder.pool_attn": (1, width),
        "cap_encoder.out_proj": (1, width),
    }  # fmt: skip
    return ranknet() | {
        f"{name}.{kind}": s[:n] for name, s in sizes.items() for kind, n in (("weight", 2), ("bias", 1))
    }


def save_hpsv3(folder, whole_words=False):
    """Save a tiny HPSv3, and return the options with which the reward holds it."""
    base = save_base(folder / "base", "qwen2_vl", whole_words)
    save_file(weights(base, ranknet()), folder / "HPSv3.safetensors")
    return {"path": str(folder), "base": str(base), "dtype": "float32"}


def save_hpsv3_plus(folder, whole_words=False):
    base = save_base(folder / "base", "qwen3_vl", whole_words)
    torch.save(weights(base, conditioned()), folder / "hpsv3++.pth")
    return {"path": str(folder), "base": str(base), "dtype": "float32"}


NORM = {"VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105, "TA_std": 2.5121}


def save_video_align(folder, outputs=1, adapted=True, norm=NORM):
    """Save a tiny VideoReward whose head has `outputs`: as released, one, with adapters and constants to normalise by."""
    base = save_base(folder / "base", "qwen2_vl")
    settings = {
        "data_config": {
            "max_frame_pixels": 200704, "num_frames": None, "fps": 2.0, "eval_dim": ["VQ", "MQ", "TA"],
            "prompt_template_type": "detailed_special", "sample_type": "uniform",
        },
        "peft_lora_config": {"lora_enable": adapted, "lora_r": RANK, "lora_alpha": 2 * RANK},
        **({"inference_config": norm} if norm else {}),
    }  # fmt: skip
    (folder / "model_config.json").write_text(json.dumps(settings))
    (folder / "checkpoint-7").mkdir()
    torch.save(weights(base, {"rm_head.weight": (outputs, WIDTH)}, adapted), folder / "checkpoint-7" / "model.pth")
    return {"path": str(folder), "base": str(base), "dtype": "float32", "fps": 16}


def picture(height, width, shift):
    """A picture (3, H, W) in [0, 1] of whole levels: waves of straight flanks."""
    rows, columns, colours = torch.arange(height)[:, None], torch.arange(width), torch.arange(3)[:, None, None]
    return ((3 * rows + 2 * columns + 40 * colours + 17 * shift) % 510 - 255).abs() / 255


def video(count, height, width, shift):
    """A video (F, 3, H, W) of such pictures, whose waves move."""
    return torch.stack([picture(height, width, shift + i) for i in range(count)])
