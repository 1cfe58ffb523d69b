"""Tiny pipelines that begin at a picture with noise added: Stable Diffusion 3, Flux, Qwen-Image, Z-Image."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLQwenImage,
    FluxImg2ImgPipeline,
    FluxTransformer2DModel,
    QwenImageImg2ImgPipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Img2ImgPipeline,
    ZImageImg2ImgPipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextModelWithProjection,
    Qwen3Model,
)

from zoo.base import (
    Specimen,
    clip_text,
    picture,
    qwen3,
    qwen_tokenizer,
    qwen_vl,
    sentence_tokenizer,
    t5,
)
from zoo.image import EDIT, Euler, awake, kl, of, specimen


def sd3_from_picture():
    """Stable Diffusion 3 from a picture."""
    transformer = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )
    return StableDiffusion3Img2ImgPipeline(
        transformer=awake(transformer),
        scheduler=Euler(shift=3.0),
        vae=kl(2, shift_factor=0.0609, scaling_factor=1.5305),
        text_encoder=clip_text(CLIPTextModelWithProjection),
        tokenizer=sentence_tokenizer(),
        text_encoder_2=clip_text(CLIPTextModelWithProjection),
        tokenizer_2=sentence_tokenizer(),
        text_encoder_3=t5(),
        tokenizer_3=sentence_tokenizer(),
    )


def flux_from_picture():
    """Flux from a picture."""
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 2, 2),
    )
    return FluxImg2ImgPipeline(
        scheduler=Euler(shift=3.0, use_dynamic_shifting=True),
        vae=kl(2, shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=clip_text(),
        tokenizer=sentence_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=sentence_tokenizer(),
        transformer=awake(transformer),
    )


def qwen_from_picture():
    """Qwen Image from a picture."""
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 2, 2),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.1] * 4, latents_std=[2.0] * 4
    )
    return QwenImageImg2ImgPipeline(
        scheduler=Euler(use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02),
        vae=vae.eval(),
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        transformer=awake(transformer),
    )


def zimage_from_picture():
    """Z-Image from a picture."""
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    return ZImageImg2ImgPipeline(
        scheduler=Euler(shift=3.0),
        vae=kl(2, shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=qwen3(Qwen3Model),
        tokenizer=qwen_tokenizer(),
        transformer=awake(transformer),
    )


LATER = {"strength": 0.6, "max_sequence_length": 16}


SPECIMENS: dict[str, Specimen] = {
    "StableDiffusion3Img2ImgPipeline": specimen(sd3_from_picture, of(16, **LATER), EDIT, image=picture()),
    "FluxImg2ImgPipeline": specimen(
        flux_from_picture, of(16, **{**LATER, "guidance_scale": 3.5}), EDIT, image=picture()
    ),
    "QwenImageImg2ImgPipeline": specimen(
        qwen_from_picture,
        {**of(**LATER), "guidance_scale": None, "true_cfg_scale": 1.0, "max_sequence_length": 512},
        EDIT,
        image=picture(),
    ),
    "ZImageImg2ImgPipeline": specimen(
        zimage_from_picture, of(strength=0.6, max_sequence_length=128, guidance_scale=0.0), EDIT, image=picture()
    ),
}
