"""Tiny pipelines of HunyuanImage 2.1."""

from __future__ import annotations

from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKLHunyuanImage,
    AutoencoderKLHunyuanImageRefiner,
    HunyuanImagePipeline,
    HunyuanImageRefinerPipeline,
    HunyuanImageTransformer2DModel,
)
from transformers import (
    ByT5Tokenizer,
)

from zoo.base import (
    VISION_TOKENS,
    Specimen,
    byte_tokenizer,
    qwen_tokenizer,
    qwen_vl,
    seeded,
    t5,
)
from zoo.qwen_parts import AXES, HEADS, LATENT, PICTURE, SMALL, awake, flow

HUNYUAN = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    **HEADS,
}


def hunyuan_image(distilled: bool = False) -> HunyuanImagePipeline:
    """HunyuanImage 2.1: guided by its own component, or distilled to take guidance and the next timestep as inputs."""
    guider = {} if distilled else {"guider": AdaptiveProjectedMixGuidance(guidance_scale=3.0)}
    made = HunyuanImagePipeline(
        scheduler=flow(4.0 if distilled else 5.0),
        vae=AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=LATENT,
            block_out_channels=(32, 32),
            layers_per_block=1,
            spatial_compression_ratio=2,
            sample_size=16,
            scaling_factor=0.75289,
        ).eval(),
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=ByT5Tokenizer(),
        transformer=awake(
            HunyuanImageTransformer2DModel(
                in_channels=LATENT,
                out_channels=LATENT,
                text_embed_2_dim=32,
                rope_axes_dim=(8, 8),
                guidance_embeds=distilled,
                use_meanflow=distilled,
                **HUNYUAN,
            )
        ),
        **guider,
    )
    made.tokenizer_max_length, made.tokenizer_2_max_length = 256, 16
    return made


def hunyuan_refiner() -> HunyuanImageRefinerPipeline:
    """The refiner of HunyuanImage 2.1."""
    tokens = byte_tokenizer("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", *VISION_TOKENS, length=2048)
    return HunyuanImageRefinerPipeline(
        scheduler=flow(4.0),
        vae=AutoencoderKLHunyuanImageRefiner(
            latent_channels=LATENT,
            block_out_channels=(8, 8, 8),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ).eval(),
        text_encoder=qwen_vl(),
        tokenizer=tokens,
        transformer=awake(
            HunyuanImageTransformer2DModel(
                in_channels=4 * LATENT,
                out_channels=2 * LATENT,
                patch_size=(1, 1, 1),
                rope_axes_dim=AXES,
                guidance_embeds=True,
                **HUNYUAN,
            )
        ),
    )


SPECIMENS: dict[str, Specimen] = {
    "HunyuanImagePipeline": Specimen(seeded(hunyuan_image), "text-to-image", SMALL),
    "HunyuanImagePipeline (distilled)": Specimen(
        seeded(lambda: hunyuan_image(distilled=True)), "text-to-image", {**SMALL, "distilled_guidance_scale": 3.25}
    ),
    "HunyuanImageRefinerPipeline": Specimen(
        seeded(hunyuan_refiner), "image-to-image", {**SMALL, "distilled_guidance_scale": 3.25}, PICTURE
    ),
}
