"""Tiny vision-language models that rewards ask, with random weights and a tokenizer of bytes; no network."""

import torch
from tiny_rewards import shaken
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|endoftext|>"
SPECIAL = (END, "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
KINDS = {
    "qwen2_5_vl": (
        Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor,
        {"window_size": 56, "fullatt_block_indexes": [1], "patch_size": 14}, {"mrope_section": [2, 3, 3]},
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLProcessor, Qwen3VLVideoProcessor,
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 16},
        {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
    ),
}  # fmt: skip


def byte_tokenizer(word="Yes"):
    """Make a tokenizer of bytes that has one word of three letters beside them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, word[:2], word])}
    inner = Tokenizer(models.BPE(vocabulary, [(word[0], word[1]), (word[:2], word[2])]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=END, eos_token="<|im_end|>")


def save_qwen(folder, kind="qwen2_5_vl", chat=CHAT):
    """Save a shrunk Qwen2.5-VL or Qwen3-VL with the patches of the real one, whose "Yes" is neither sure nor unlikely."""
    tokenizer = byte_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*SPECIAL, "Yes")}
    network, config, processor, videos, vision, rope = KINDS[kind]
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **size, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer), "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope}, "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids[END],
    }  # fmt: skip
    vision = {**vision, "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    places = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    places |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    special = {key: ids[name] for key, name in places.items()}
    model = shaken(lambda: network(config(text_config=text, vision_config=vision, **special)))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)[ids["Yes"]].mul_(-10)
    model.save_pretrained(folder)
    side = 2 * vision["patch_size"]
    images = Qwen2VLImageProcessor(
        patch_size=vision["patch_size"], min_pixels=4 * side * side, max_pixels=16384 * side * side
    )
    processor(images, tokenizer, videos(patch_size=vision["patch_size"]), chat_template=chat).save_pretrained(folder)
    return folder
