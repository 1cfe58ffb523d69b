"""Models that several video pipelines share."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
)
from transformers import (
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from zoo.base import (
    clip_text,
    sentence_tokenizer,
)

STEPS = {"num_inference_steps": 4}
CLIP_LENGTH = 77  # the length that pipelines with a second, CLIP encoder write into their code


def stirred(model: torch.nn.Module) -> torch.nn.Module:
    """The model with random values in place of weights that are all zero, so that its output depends on everything."""
    for weight in model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.05)
    return model.eval()


def clip_pair() -> dict[str, Any]:
    """A CLIP text encoder and its tokenizer, as the second ones of a pipeline."""
    return {"text_encoder_2": clip_text(length=CLIP_LENGTH), "tokenizer_2": sentence_tokenizer(CLIP_LENGTH)}


def siglip() -> dict[str, Any]:
    """A Siglip picture encoder and its processor."""
    config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    return {
        "image_encoder": SiglipVisionModel(config).eval(),
        "feature_extractor": SiglipImageProcessor(size={"height": 16, "width": 16}),
    }


def hunyuan_vae() -> AutoencoderKLHunyuanVideo:
    """The VAE of HunyuanVideo and Kandinsky 5: 4 frames and 8 x 8 pixels to a latent of 4 channels."""
    return AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    ).eval()
