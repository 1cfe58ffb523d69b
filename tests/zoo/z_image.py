"""Tiny pipelines of Z-Image and GLM-Image."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
    ZImageControlNetModel,
    ZImageControlNetPipeline,
    ZImageOmniPipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessor,
    GlmImageProcessor,
    Qwen3Model,
    Siglip2ImageProcessor,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)

from zoo.base import (
    CHAT_TEMPLATE,
    DECODER,
    Specimen,
    byte_tokenizer,
    picture,
    qwen3,
    qwen_tokenizer,
    seeded,
    t5,
)
from zoo.qwen_parts import AXES, CONTROL, HEADS, LATENT, SMALL, STATISTICS, STEPS, awake, by_resolution, flow

# Z-Image ----------------------------------------------------------------------------------------------------------


def kl_vae(levels: int = 2, **config) -> AutoencoderKL:
    """An `AutoencoderKL` of a scale of `2 ** (levels - 1)`."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(4,) * levels,
        latent_channels=LATENT,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **config,
    ).eval()


def z_image(
    kind: Callable[..., DiffusionPipeline] = ZImagePipeline,
    levels: int = 2,
    siglip_feat_dim: int | None = None,
    **parts,
):
    """A pipeline of Z-Image; `levels` are those of its autoencoder, `parts` further components."""
    return kind(
        scheduler=flow(3.0),
        vae=kl_vae(levels, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=qwen3(Qwen3Model),
        tokenizer=qwen_tokenizer(),
        transformer=awake(
            ZImageTransformer2DModel(
                in_channels=LATENT,
                dim=32,
                n_layers=2,
                n_refiner_layers=1,
                n_heads=2,
                n_kv_heads=2,
                cap_feat_dim=16,
                siglip_feat_dim=siglip_feat_dim,
                axes_dims=list(AXES),
                axes_lens=[512, 32, 32],
            )
        ),
        **parts,
    )


def z_image_controlnet() -> ZImageControlNetPipeline:
    """Z-Image with a ControlNet."""
    places = {"control_layers_places": [0], "control_refiner_layers_places": [0]}
    return z_image(
        ZImageControlNetPipeline,
        controlnet=awake(
            ZImageControlNetModel(
                **places,
                control_in_dim=LATENT,
                add_control_noise_refiner="control_noise_refiner",
                dim=32,
                n_refiner_layers=1,
                n_heads=2,
                n_kv_heads=2,
            )
        ),
    )


def z_image_omni() -> ZImageOmniPipeline:
    """Z-Image that sees pictures. It hands them to its autoencoder in bfloat16, whatever the type of that."""
    vision = Siglip2VisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_patches=16, patch_size=8
    )
    made = z_image(
        ZImageOmniPipeline,
        levels=3,
        siglip_feat_dim=16,
        siglip=Siglip2VisionModel(vision).eval(),
        siglip_processor=Siglip2ImageProcessor(patch_size=8, max_num_patches=16),
    )
    made.vae.bfloat16()
    return made


# GLM-Image --------------------------------------------------------------------------------------------------------


def glm_image() -> GlmImagePipeline:
    """GLM-Image: a language model writes tokens of a coarse picture, which the transformer then renders."""
    tokens = byte_tokenizer(
        "<|image_pad|>",
        "<grid>",
        "</grid>",
        length=2048,
        image_token="<|image_pad|>",
        grid_bos_token="<grid>",
        grid_eos_token="</grid>",
    )
    codes = 64
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 32,
        "image_size": 64,
    }
    language = GlmImageForConditionalGeneration(
        GlmImageConfig(
            text_config={
                **{k: v for k, v in DECODER.items() if k != "head_dim"},
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "vision_vocab_size": codes,
                "initializer_range": 1.0,
                "eos_token_id": None,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            },
            vision_config=vision,
            vq_config={"embed_dim": 8, "num_embeddings": codes, "latent_channels": 16},
            image_token_id=tokens.convert_tokens_to_ids("<|image_pad|>"),
            image_start_token_id=tokens.bos_token_id,
            image_end_token_id=tokens.eos_token_id,
        )
    ).eval()
    with torch.no_grad():  # so that a token follows from the prompt rather than from the token before
        language.model.language_model.embed_tokens.weight *= 0.1
    return GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=GlmImageProcessor(GlmImageImageProcessor(), tokens, chat_template=CHAT_TEMPLATE),
        text_encoder=t5(),
        vision_language_encoder=language,
        vae=kl_vae(4, **STATISTICS),
        transformer=awake(
            GlmImageTransformer2DModel(
                in_channels=LATENT,
                out_channels=LATENT,
                num_layers=2,
                text_embed_dim=32,
                time_embed_dim=32,
                condition_dim=8,
                prior_vq_quantizer_codebook_size=codes,
                **HEADS,
            )
        ),
        scheduler=by_resolution(base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
    )


SPECIMENS: dict[str, Specimen] = {
    "ZImagePipeline": Specimen(
        seeded(z_image), "text-to-image", {**SMALL, "guidance_scale": 0.0, "max_sequence_length": 64}
    ),
    "ZImageControlNetPipeline": Specimen(
        seeded(z_image_controlnet),
        "controlled text-to-image",
        {**SMALL, "guidance_scale": 3.0, "max_sequence_length": 64},
        CONTROL,
    ),
    "ZImageOmniPipeline": Specimen(
        seeded(z_image_omni),
        "image-editing",
        {**SMALL, "guidance_scale": 0.0, "max_sequence_length": 64},
        {"image": [picture(width=64, height=64)]},
    ),
    "GlmImagePipeline": Specimen(
        seeded(glm_image), "text-to-image", {**STEPS, "height": 64, "width": 64, "guidance_scale": 1.0}
    ),
}
