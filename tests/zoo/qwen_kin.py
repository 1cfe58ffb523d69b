"""Tiny pipelines whose text encoder is a Qwen 3 VL: Krea 2, JoyImage, Nucleus, DreamLite, ERNIE, Ideogram 4, Fibo 2.

ERNIE alone has a Mistral 3; it shares their autoencoder.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import (
    AutoencoderKLFlux2,
    AutoencoderTiny,
    BriaFibo2Pipeline,
    BriaFibo2Transformer2DModel,
    DiffusionPipeline,
    DreamLiteMobilePipeline,
    DreamLitePipeline,
    DreamLiteUNetModel,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
    JoyImageEditPipeline,
    JoyImageEditPlusPipeline,
    JoyImageEditPlusTransformer3DModel,
    JoyImageEditTransformer3DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    NucleusMoEImagePipeline,
    NucleusMoEImageTransformer2DModel,
)
from transformers import (
    Mistral3Config,
    Mistral3Model,
    Qwen3VLModel,
)

from zoo.base import (
    DECODER,
    Specimen,
    picture,
    qwen_tokenizer,
    seeded,
    sentence_tokenizer,
)
from zoo.qwen_parts import (
    AXES,
    HEADS,
    LATENT,
    PICTURE,
    QWEN,
    SMALL,
    STEPS,
    awake,
    by_resolution,
    flow,
    large_scale_vae,
    qwen3_vl,
    qwen3_vl_processor,
    qwen_vae,
)


def krea2() -> Krea2Pipeline:
    """Krea 2, which reads several layers of its text encoder."""
    return Krea2Pipeline(
        scheduler=by_resolution(max_image_seq_len=6400),
        vae=qwen_vae(),
        text_encoder=qwen3_vl(Qwen3VLModel),
        tokenizer=qwen_tokenizer(),
        transformer=awake(
            Krea2Transformer2DModel(
                in_channels=4 * LATENT,
                num_layers=2,
                num_key_value_heads=1,
                intermediate_size=32,
                timestep_embed_dim=16,
                text_hidden_dim=16,
                num_text_layers=2,
                text_num_attention_heads=2,
                text_num_key_value_heads=2,
                text_intermediate_size=32,
                num_layerwise_text_blocks=1,
                num_refiner_text_blocks=1,
                axes_dims_rope=AXES,
                **HEADS,
            )
        ),
        text_encoder_select_layers=(1, 2),
    )


JOY = {
    "in_channels": LATENT,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 16,
    "mlp_width_ratio": 2.0,
    "num_layers": 2,
    "rope_dim_list": list(AXES),
}


def joy(kind: Callable[..., DiffusionPipeline], transformer: torch.nn.Module):
    """A pipeline of JoyImage."""
    return kind(
        scheduler=flow(1.5),
        vae=large_scale_vae(),
        text_encoder=qwen3_vl(),
        tokenizer=qwen_tokenizer(),
        transformer=awake(transformer),
        processor=qwen3_vl_processor(),
    )


def nucleus() -> NucleusMoEImagePipeline:
    """Nucleus-Image, a mixture of experts."""
    transformer = NucleusMoEImageTransformer2DModel(
        **QWEN,
        mlp_ratio=2.0,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=2,
        moe_intermediate_dim=16,
        capacity_factors=[1.0, 1.0],
    )
    for name, parameter in transformer.named_parameters():
        if ".experts." in name:  # left uninitialised
            torch.nn.init.normal_(parameter, std=0.1)
    return NucleusMoEImagePipeline(
        transformer=awake(transformer),
        scheduler=by_resolution(),
        vae=qwen_vae(),
        text_encoder=qwen3_vl(layers=8),
        processor=qwen3_vl_processor(),
    )


def dreamlite(kind: Callable[..., DiffusionPipeline]):
    """DreamLite, a UNet that sees noise and condition side by side."""
    return kind(
        text_encoder=qwen3_vl(),
        tokenizer=qwen_tokenizer(),
        processor=qwen3_vl_processor(),
        vae=AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
            upsampling_scaling_factor=2,
        ).eval(),
        unet=awake(
            DreamLiteUNetModel(
                block_out_channels=(8, 8, 16),
                layers_per_block=1,
                norm_num_groups=4,
                cross_attention_dim=16,
                attention_head_dim=2,
                addition_embed_type="time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=16,
            )
        ),
        scheduler=by_resolution(max_shift=1.16),
    )


def flux2_vae() -> AutoencoderKLFlux2:
    """FLUX.2's autoencoder, of a scale of 2 and patches of 2."""
    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 8),
        layers_per_block=1,
        latent_channels=LATENT,
        norm_num_groups=2,
    ).eval()


def ernie() -> ErnieImagePipeline:
    """ERNIE-Image, without the model that rewrites prompts."""
    text = {k: v for k, v in DECODER.items() if k != "pad_token_id"}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    return ErnieImagePipeline(
        transformer=awake(
            ErnieImageTransformer2DModel(
                hidden_size=32,
                num_attention_heads=2,
                num_layers=2,
                ffn_hidden_size=32,
                in_channels=4 * LATENT,
                out_channels=4 * LATENT,
                text_in_dim=16,
                rope_axes_dim=AXES,
            )
        ),
        vae=flux2_vae(),
        text_encoder=Mistral3Model(
            Mistral3Config(
                text_config={**text, "model_type": "ministral3", "hidden_size": 16},
                vision_config={**vision, "model_type": "pixtral", "patch_size": 8, "image_size": 16},
            )
        ).eval(),
        tokenizer=sentence_tokenizer(length=256),
        scheduler=flow(3.0),
    )


def ideogram4() -> Ideogram4Pipeline:
    """Ideogram 4: a second transformer predicts without the prompt; the text encoder is read at 13 of 36 layers."""
    config = {
        "in_channels": 4 * LATENT,
        "num_layers": 2,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": 13 * 16,
        "mrope_section": (4, 2, 2),
        **HEADS,
    }
    return Ideogram4Pipeline(
        scheduler=flow(),
        vae=flux2_vae(),
        text_encoder=qwen3_vl(Qwen3VLModel, layers=36),
        tokenizer=qwen_tokenizer(),
        transformer=awake(Ideogram4Transformer2DModel(**config)),
        unconditional_transformer=awake(Ideogram4Transformer2DModel(**config)),
    )


def fibo2() -> BriaFibo2Pipeline:
    """Bria's Fibo 2, which reads 16 of 36 layers of its text encoder."""
    return BriaFibo2Pipeline(
        transformer=awake(
            BriaFibo2Transformer2DModel(
                in_channels=LATENT,
                dim=32,
                n_layers=5,
                n_refiner_layers=1,
                n_heads=2,
                cap_feat_dim=3 * 16,
                injection_layer_ids=(0, 1, 2, 3, 4),
                perceiver_num_layers=1,
                min_num_gist_tokens=4,
                max_num_gist_tokens=8,
                gist_step=2,
                gist_min_text_len=32,
                gist_max_text_len=128,
                axes_dims=AXES,
                axes_lens=(64, 32, 32),
            )
        ),
        scheduler=by_resolution(),
        vae=flux2_vae(),
        text_encoder=qwen3_vl(layers=36),
        processor=qwen3_vl_processor(),
    )


SPECIMENS: dict[str, Specimen] = {
    "Krea2Pipeline": Specimen(
        seeded(krea2), "text-to-image", {**SMALL, "guidance_scale": 0.0, "max_sequence_length": 256}
    ),
    "JoyImageEditPipeline": Specimen(
        seeded(lambda: joy(JoyImageEditPipeline, JoyImageEditTransformer3DModel(**JOY))),
        "image-editing",
        {**STEPS, "guidance_scale": 1.0},
        PICTURE,
    ),
    "JoyImageEditPlusPipeline": Specimen(
        seeded(lambda: joy(JoyImageEditPlusPipeline, JoyImageEditPlusTransformer3DModel(**JOY))),
        "image-editing",
        {**STEPS, "height": 256, "width": 256, "guidance_scale": 1.0},
        {"images": [picture()]},
    ),
    "ErnieImagePipeline": Specimen(seeded(ernie), "text-to-image", {**SMALL, "guidance_scale": 1.0}),
    "DreamLitePipeline": Specimen(
        seeded(lambda: dreamlite(DreamLitePipeline)), "text-to-image", {**SMALL, "guidance_scale": 3.0}
    ),
    "DreamLitePipeline (editing)": Specimen(
        seeded(lambda: dreamlite(DreamLitePipeline)),
        "image-editing",
        {**SMALL, "guidance_scale": 3.0, "image_guidance_scale": 1.5},
        PICTURE,
    ),
    "DreamLiteMobilePipeline": Specimen(seeded(lambda: dreamlite(DreamLiteMobilePipeline)), "text-to-image", SMALL),
    "Ideogram4Pipeline": Specimen(
        seeded(ideogram4),
        "text-to-image",
        {**SMALL, "guidance_scale": 3.0, "guidance_schedule": None, "max_sequence_length": 128},
    ),
    "NucleusMoEImagePipeline": Specimen(
        seeded(nucleus), "text-to-image", {**SMALL, "guidance_scale": 1.0, "max_sequence_length": 512}
    ),
    "BriaFibo2Pipeline": Specimen(seeded(fibo2), "text-to-image", {**SMALL, "guidance_scale": 1.0}),
    "BriaFibo2Pipeline (editing)": Specimen(seeded(fibo2), "image-editing", {**SMALL, "guidance_scale": 1.0}, PICTURE),
}
