"""Components that several pipelines share, or that are more than a config: tokenizers, encoders, autoencoders, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan, UniPCMultistepScheduler
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    CLIPImageProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from zoo.base import find, picture

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'text' %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 512  # more than any tokenizer here has
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"vocab_size": VOCABULARY, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**WIDTHS, **IDS, "num_key_value_heads": 2, "head_dim": 8}
PATCHES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCHES |= {"image_size": 16, "patch_size": 8}  # of a picture encoder
VISION_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


# Tokenizers


def byte_tokenizer(
    special: Sequence[str] = (), length: int = 512, chat_template: str | None = CHAT_TEMPLATE, **names: str
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
    made = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=length, **roles)
    made.chat_template = chat_template
    return made


def sentence_tokenizer(length: int = 16, padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A byte tokenizer that puts `<s>` before and `</s>` behind, as those of CLIP and T5 do."""
    made = byte_tokenizer(length=length, chat_template=None)
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.padding_side = padding_side
    return made


def qwen_tokenizer(truncation_side: str = "right") -> PreTrainedTokenizerFast:
    made = byte_tokenizer(VISION_TOKENS, length=2048, eos_token="<|im_end|>")
    made.truncation_side = truncation_side
    return made


def vision_ids() -> dict[str, int]:
    """Return the picture tokens of `qwen_tokenizer`, by their names in configs."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    return dict(zip(names, qwen_tokenizer().convert_tokens_to_ids(tokens), strict=True))


# Encoders


def clip_text(kind: str = "CLIPTextModel", length: int = 16) -> nn.Module:
    """A CLIP text encoder; `kind` may be the one with a projection."""
    sizes = {**WIDTHS, **IDS, "hidden_size": 16, "projection_dim": 16, "max_position_embeddings": length}
    return find(kind)(transformers.CLIPTextConfig(**sizes))


def clip_vision(kind: str = "CLIPVisionModel") -> nn.Module:
    return find(kind)(transformers.CLIPVisionConfig(**PATCHES, projection_dim=16))


def clip_pictures() -> CLIPImageProcessor:
    return CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


def siglip() -> nn.Module:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**PATCHES))


def siglip_pictures() -> Any:
    return transformers.SiglipImageProcessor(size={"height": 16, "width": 16})


T5 = {"vocab_size": VOCABULARY, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "pad_token_id": 0}


def t5() -> nn.Module:
    return transformers.T5EncoderModel(transformers.T5Config(d_model=32, **T5))


def umt5(width: int = 32) -> nn.Module:
    return transformers.UMT5EncoderModel(transformers.UMT5Config(d_model=width, **T5))


def decoder(
    kind: str,
    width: int = 16,
    layers: int = 2,
    config: str | None = None,
    attn_implementation: str | None = None,
    **sizes,
) -> nn.Module:
    """A language model of a kind of transformers, such as `Qwen3Model`; its config is that of its class, or one by name."""
    kind = find(kind)
    made = kind(
        (find(config) if config else kind.config_class)(
            **{"hidden_size": width, **DECODER, "num_hidden_layers": layers, **sizes}
        )
    )
    if attn_implementation:
        made.set_attn_implementation(attn_implementation)
    return made


def t5_gemma() -> nn.Module:
    text = transformers.T5GemmaModuleConfig(hidden_size=16, query_pre_attn_scalar=8, **DECODER)
    return transformers.T5GemmaEncoderModel(
        transformers.T5GemmaConfig(encoder=text, decoder=text, is_encoder_decoder=False)
    )


def t5_gemma2() -> nn.Module:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = find("transformers.models.t5gemma2.configuration_t5gemma2.T5Gemma2EncoderConfig")
    return transformers.T5Gemma2Encoder(
        config(
            text_config={**DECODER, "hidden_size": 16, "query_pre_attn_scalar": 8, "dropout_rate": 0.0},
            vision_config={"model_type": "siglip_vision_model", **vision, "image_size": 16, "patch_size": 8},
            mm_tokens_per_image=4,
        )
    )


def gemma3() -> nn.Module:
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config={**DECODER, "hidden_size": 16, "query_pre_attn_scalar": 8, "sliding_window": 16},
            vision_config=siglip().config.to_dict(),
            mm_tokens_per_image=4,
        )
    )


def llava(special: Sequence[str]) -> nn.Module:
    """A Llava that reads a picture as 4 tokens, for a `byte_tokenizer` with these special tokens."""
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=clip_vision().config,
            text_config=decoder("LlamaModel", layers=3).config,
            image_token_index=byte_tokenizer(special).convert_tokens_to_ids("<image>"),
            image_seq_length=4,
            pad_token_id=0,
        )
    )


def mistral3(kind: str, text: dict, vision: dict, image_token: bool = False, without: Sequence[str] = ()) -> nn.Module:
    """A Mistral 3; `image_token` is whether it knows that of `qwen_tokenizer`."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    image = {"image_token_index": vision_ids()["image_token_id"]} if image_token else {}
    words = {key: value for key, value in DECODER.items() if key not in without}
    config = transformers.Mistral3Config(
        text_config={"hidden_size": 16, **words, **text},
        vision_config={"model_type": "pixtral", **sizes, **vision},
        **image,
    )
    return find(kind)(config)


def qwen_vl() -> nn.Module:
    text = {key: value for key, value in DECODER.items() if key != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"patch_size": 14, "spatial_merge_size": 2, "fullatt_block_indexes": [1], "window_size": 56}
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config={**text, "hidden_size": 16, "max_position_embeddings": 2048, "rope_parameters": rope},
            vision_config=vision,
            **vision_ids(),
        )
    )


def qwen_vl_language() -> nn.Module:
    return qwen_vl().model.language_model


def qwen_vl_processor() -> Qwen2VLProcessor:
    pictures, videos = (
        kind(min_pixels=28**2, max_pixels=56**2) for kind in (Qwen2VLImageProcessor, Qwen2VLVideoProcessor)
    )
    return Qwen2VLProcessor(pictures, qwen_tokenizer(), videos, chat_template=CHAT_TEMPLATE)


def qwen3_vl(kind: str = "Qwen3VLForConditionalGeneration", layers: int = 2) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {key: value for key, value in DECODER.items() if key not in ("bos_token_id", "eos_token_id")}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return find(kind)(
        transformers.Qwen3VLConfig(
            text_config={**text, "num_hidden_layers": layers, "hidden_size": 16, "rope_parameters": rope},
            vision_config=vision,
            **vision_ids(),
        )
    )


def qwen3_vl_processor() -> Any:
    """The processor for `qwen3_vl`: a token for each 32 x 32 pixels."""
    sizes = {"patch_size": 16, "min_pixels": 32 * 32, "max_pixels": 64 * 64}
    pictures, videos = Qwen2VLImageProcessor(**sizes), transformers.Qwen3VLVideoProcessor(**sizes)
    return transformers.Qwen3VLProcessor(pictures, qwen_tokenizer(), videos, chat_template=CHAT_TEMPLATE)


def glm_image_tokenizer() -> PreTrainedTokenizerFast:
    roles = {"image_token": "<|image_pad|>", "grid_bos_token": "<grid>", "grid_eos_token": "</grid>"}
    return byte_tokenizer(list(roles.values()), length=2048, **roles)


def glm_image_processor() -> Any:
    pictures = transformers.GlmImageImageProcessor()
    return transformers.GlmImageProcessor(pictures, glm_image_tokenizer(), chat_template=CHAT_TEMPLATE)


def glm_image_language(codes: int) -> nn.Module:
    """The language model of GLM-Image, which writes one of `codes` tokens for each part of a coarse picture."""
    tokens = glm_image_tokenizer()
    text = {key: value for key, value in DECODER.items() if key != "head_dim"}
    text |= {"hidden_size": 16, "num_hidden_layers": 1, "vision_vocab_size": codes, "initializer_range": 1.0}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    made = transformers.GlmImageForConditionalGeneration(
        transformers.GlmImageConfig(
            text_config={**text, "eos_token_id": None, "rope_parameters": rope},
            vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "image_size": 64},
            vq_config={"embed_dim": 8, "num_embeddings": codes, "latent_channels": 16},
            image_token_id=tokens.convert_tokens_to_ids("<|image_pad|>"),
            image_start_token_id=tokens.bos_token_id,
            image_end_token_id=tokens.eos_token_id,
        )
    )
    with torch.no_grad():  # so that a token follows from the prompt rather than from the token before
        made.model.language_model.embed_tokens.weight *= 0.1
    return made


# Autoencoders, a scheduler and a checker


def vae(
    widths: Sequence[int] = (4, 8), channels: int = 4, kind: str = "AutoencoderKL", certain: bool = False, **config
) -> nn.Module:
    """An autoencoder that halves a picture at each level but the last; `certain` of its latents as trained ones are."""
    made = find(kind)(
        **{
            "down_block_types": ("DownEncoderBlock2D",) * len(widths),
            "up_block_types": ("UpDecoderBlock2D",) * len(widths),
            "block_out_channels": tuple(widths),
            "layers_per_block": 1,
            "latent_channels": channels,
            "norm_num_groups": 2,
            **config,
        }
    )
    if certain:
        made.quant_conv.bias.data[channels:] = -40.0
    return made


class Still:
    """An autoencoder whose posterior has no width, for pipelines that draw from it without the call's generator."""

    def encode(self, *args, **kwargs):
        encoded = super().encode(*args, **kwargs)
        encoded.latent_dist.std = torch.zeros_like(encoded.latent_dist.std)
        return encoded


class StillKL(Still, AutoencoderKL):
    pass


class StillQwen(Still, AutoencoderKLQwenImage):
    pass


class PooledQwen(AutoencoderKLQwenImage):
    """The autoencoder of Qwen-Image on pictures 32 times smaller, for the pipeline that makes them 1024 pixels wide."""

    def __init__(self, **config):
        super().__init__(**config)
        self.temperal_downsample = [False] * (5 + len(self.temperal_downsample))

    def encode(self, x, **kwargs):
        return super().encode(nn.functional.avg_pool3d(x, (1, 32, 32)), **kwargs)

    def decode(self, z, **kwargs):
        return (nn.functional.interpolate(super().decode(z, return_dict=False)[0], scale_factor=(1, 32, 32)),)


def large_scale_vae(channels: int = 3, latent: int = 4) -> AutoencoderKLWan:
    """An autoencoder of a scale of 64, for the pipelines that encode pictures of a million pixels whatever they get.

    Those of Qwen-Image take the length of `temperal_downsample` for the binary logarithm of the scale. The posterior is
    certain, since JoyImage draws from it without a generator.
    """
    made = AutoencoderKLWan(
        base_dim=4,
        z_dim=latent,
        dim_mult=[1] * 3,
        num_res_blocks=1,
        temperal_downsample=[False] * 6,
        in_channels=channels * 16**2,
        out_channels=channels * 16**2,
        patch_size=16,
        scale_factor_temporal=1,
        scale_factor_spatial=64,
        latents_mean=[0.1, -0.1, 0.2, -0.2] * (latent // 4),
        latents_std=[1.0, 1.1, 0.9, 1.2] * (latent // 4),
    )
    with torch.no_grad():
        made.quant_conv.weight[latent:] = 0.0
        made.quant_conv.bias[latent:] = -30.0
    return made


def uni_pc(shift: float = 3.0, **settings) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, **settings
    )


class Unguarded:
    """A safety checker that lets all pass."""

    def to(self, *args, **kwargs) -> Unguarded:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames):
        return frames


# Conditions


def half_mask() -> Image.Image:
    """A mask of 16 x 16 pixels, the left half of it white: that is painted anew."""
    mask = Image.new("L", (16, 16))
    mask.paste(255, (0, 0, 8, 16))
    return mask


def clip(seed: int = 0, mask: bool = False) -> torch.Tensor:
    """A video as a tensor of values between 0 and 1: one row, channels, 5 frames, height, width."""
    pictures = np.stack([picture(seed + i, 32, 16) for i in range(5)])
    video = torch.from_numpy(pictures).permute(3, 0, 1, 2)[None] / 255
    return video[:, :1].round() if mask else video


def sound() -> torch.Tensor:
    time = torch.linspace(0, 40, 320)
    return torch.stack([time.sin(), (3 * time).cos()]).mul(0.5)[None].contiguous()
