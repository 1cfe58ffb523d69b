"""What a specimen of the zoo is, and the parts that several of them share: tokenizers, encoders, conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from flowgrpo.data.prompts import Row

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'text' %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Specimen:
    """A tiny pipeline and how to call it.

    Attributes:
        build: makes the pipeline, the same each time.
        task: text-to-image, image-editing, text-to-video, image-to-video, text-to-audio, ...
        call: arguments of its call, as `model.call` in a config.
        columns: conditions of a row by argument name: pictures (PIL), lists of them, texts.
        prompts: two of unequal length that the pipeline understands.
    """

    build: Callable[[], DiffusionPipeline]
    task: str
    call: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[str, str] = ("a red fox in the snow", "a cat")

    @property
    def rows(self) -> list[Row]:
        """Three rows for `flowgrpo.flow.diagnostics.certificate`: two of one prompt, and one of another."""
        long, short = self.prompts
        return [Row(prompt, seed, self.columns) for seed, prompt in enumerate((long, long, short), start=1)]


def byte_tokenizer(
    *special: str,
    length: int = 512,
    chat_template: str | None = CHAT_TEMPLATE,
    kind=PreTrainedTokenizerFast,
    **names: str,
) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes: 256 letters and the special tokens, `<pad>` first; no word is unknown to it.

    Args:
        special: further special tokens, such as `<|image_pad|>`, each one token.
        names: tokens by role (`bos_token`, ...), beside `pad_token`, `eos_token` and `unk_token`.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **names}
    made = kind(tokenizer_object=inner, model_max_length=length, **roles)
    made.chat_template = chat_template
    return made


def sentence_tokenizer(length: int = 16, kind=PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A byte tokenizer that puts `<s>` before and `</s>` behind, as those of CLIP and T5 do."""
    made = byte_tokenizer(length=length, chat_template=None, kind=kind)
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return made


VOCABULARY = 512  # more than any tokenizer here has


def clip_text(kind=CLIPTextModel, width: int = 16, projection: int = 16, length: int = 16):
    """A CLIP text encoder; `kind` may be the one with a projection."""
    return kind(
        CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=32,
            projection_dim=projection,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=length,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


def clip_vision(kind=CLIPVisionModel, width: int = 16, side: int = 16):
    """A CLIP picture encoder of patches of 8."""
    return kind(
        CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=32,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=side,
            patch_size=8,
        )
    ).eval()


def clip_pictures(side: int = 16) -> CLIPImageProcessor:
    """The processor for `clip_vision`."""
    return CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


def t5(width: int = 32, kind=T5EncoderModel) -> T5EncoderModel:
    """A T5 encoder."""
    return kind(
        T5Config(vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=4, pad_token_id=0)
    ).eval()


def umt5(width: int = 32) -> UMT5EncoderModel:
    """A UMT5 encoder."""
    return UMT5EncoderModel(
        UMT5Config(vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=4, pad_token_id=0)
    ).eval()


DECODER = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gemma2(width: int = 16, kind=Gemma2Model):
    """A Gemma 2."""
    return kind(Gemma2Config(hidden_size=width, query_pre_attn_scalar=8, **DECODER)).eval()


def llama(width: int = 16, kind=LlamaModel, layers: int = 2):
    """A Llama."""
    return kind(LlamaConfig(hidden_size=width, **{**DECODER, "num_hidden_layers": layers})).eval()


def qwen3(kind, width: int = 16, layers: int = 2):
    """A Qwen 3; `kind` is its model or its language model."""
    return kind(Qwen3Config(hidden_size=width, **{**DECODER, "num_hidden_layers": layers})).eval()


VISION_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def qwen_tokenizer(length: int = 2048, kind=PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A byte tokenizer with Qwen's chat and picture tokens."""
    return byte_tokenizer(*VISION_TOKENS, length=length, kind=kind, eos_token="<|im_end|>")


def qwen_vl(width: int = 16, kind=Qwen2_5_VLForConditionalGeneration):
    """A Qwen 2.5 VL for `qwen_tokenizer`."""
    ids = dict(zip(VISION_TOKENS, qwen_tokenizer().convert_tokens_to_ids(list(VISION_TOKENS)), strict=True))
    text = {k: v for k, v in DECODER.items() if k != "head_dim"}
    return kind(
        Qwen2_5_VLConfig(
            text_config={
                **text,
                "hidden_size": width,
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, width // 4 - 2]},
            },
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": width,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            },
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
    ).eval()


def qwen_vl_processor() -> Qwen2VLProcessor:
    """The processor for `qwen_vl`."""
    pictures = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    videos = Qwen2VLVideoProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    tokens = qwen_tokenizer()
    return Qwen2VLProcessor(pictures, tokens, videos, chat_template=CHAT_TEMPLATE)


def picture(seed: int = 0, width: int = 32, height: int = 32) -> Image.Image:
    """A picture of coloured noise, smooth enough to survive resizing."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def seeded(build: Callable[[], DiffusionPipeline]) -> Callable[[], DiffusionPipeline]:
    """A builder whose random weights are the same each time."""

    def made() -> DiffusionPipeline:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return made
