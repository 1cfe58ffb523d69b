"""Schedulers, autoencoders and text encoders that Qwen-Image shares with its kin.

The byte tokenizer makes their prompt templates some 200 tokens long, hence `max_sequence_length` of 256 and more.
"""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from zoo.base import (
    CHAT_TEMPLATE,
    DECODER,
    VISION_TOKENS,
    picture,
    qwen_tokenizer,
)

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
AXES = (4, 6, 6)  # rotary dimensions of a head of 16
LATENT = 4
STATISTICS = {"latents_mean": [0.1, -0.1, 0.2, -0.2], "latents_std": [1.0, 1.1, 0.9, 1.2]}


def flow(shift: float = 1.0, **config) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of the family: a fixed shift, or one by resolution."""
    return FlowMatchEulerDiscreteScheduler(shift=shift, **config)


def by_resolution(**config) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler whose shift depends on the number of tokens."""
    return flow(use_dynamic_shifting=True, **{"base_shift": 0.5, "max_shift": 1.15, **config})


def awake(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with its all-zero parameters made random and its matrices enlarged, so that all it is given matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)
            elif parameter.ndim > 1:
                parameter *= 2.0
    return model.eval()


def qwen_vae() -> AutoencoderKLQwenImage:
    """Qwen-Image's autoencoder, of a scale of 4."""
    return AutoencoderKLQwenImage(
        base_dim=4, z_dim=LATENT, dim_mult=[1] * 3, num_res_blocks=1, temperal_downsample=[False, True], **STATISTICS
    ).eval()


def large_scale_vae(channels: int = 3, latent: int = LATENT) -> AutoencoderKLWan:
    """An autoencoder of a scale of 64, for the pipelines that encode pictures of a million pixels whatever they get.

    Those of Qwen-Image take the length of `temperal_downsample` for the binary logarithm of the scale. The posterior is
    certain, since JoyImage draws from it without a generator.
    """
    vae = AutoencoderKLWan(
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
        **{name: values * (latent // LATENT) for name, values in STATISTICS.items()},
    ).eval()
    with torch.no_grad():
        vae.quant_conv.weight[latent:] = 0.0
        vae.quant_conv.bias[latent:] = -30.0
    return vae


QWEN = {
    "in_channels": 4 * LATENT,
    "out_channels": LATENT,
    "num_layers": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": AXES,
    **HEADS,
}


def qwen3_vl(kind=Qwen3VLForConditionalGeneration, layers: int = 2):
    """A Qwen 3 VL for `qwen_tokenizer`."""
    ids = dict(zip(VISION_TOKENS, qwen_tokenizer().convert_tokens_to_ids(list(VISION_TOKENS)), strict=True))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {k: v for k, v in DECODER.items() if k not in ("bos_token_id", "eos_token_id")}
    return kind(
        Qwen3VLConfig(
            text_config={**text, "num_hidden_layers": layers, "hidden_size": 16, "rope_parameters": rope},
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
    ).eval()


def qwen3_vl_processor() -> Qwen3VLProcessor:
    """The processor for `qwen3_vl`: a token for each 32 x 32 pixels."""
    sizes = {"patch_size": 16, "min_pixels": 32 * 32, "max_pixels": 64 * 64}
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**sizes), qwen_tokenizer(), Qwen3VLVideoProcessor(**sizes), chat_template=CHAT_TEMPLATE
    )


STEPS = {"num_inference_steps": 4}
SMALL = {**STEPS, "height": 16, "width": 16}
PICTURE = {"image": picture()}
CONTROL = {"control_image": picture(1)}
