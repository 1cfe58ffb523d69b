"""Tiny pipelines of Qwen-Image and of what was built like it: Z-Image, GLM-Image, Krea 2, HunyuanImage, Joy, ...

All are single-stream or dual-stream transformers under flow matching, with a Qwen (or a kin of it) as text encoder.
The byte tokenizer makes their prompt templates some 200 tokens long, hence `max_sequence_length` of 256 and more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanImage,
    AutoencoderKLHunyuanImageRefiner,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
    AutoencoderTiny,
    BriaFibo2Pipeline,
    BriaFibo2Transformer2DModel,
    DiffusionPipeline,
    DreamLiteMobilePipeline,
    DreamLitePipeline,
    DreamLiteUNetModel,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
    HunyuanImagePipeline,
    HunyuanImageRefinerPipeline,
    HunyuanImageTransformer2DModel,
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
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageControlNetModel,
    QwenImageControlNetPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
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
    Mistral3Config,
    Mistral3Model,
    Qwen2VLImageProcessor,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    Siglip2ImageProcessor,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)

from zoo.base import (
    CHAT_TEMPLATE,
    DECODER,
    VISION_TOKENS,
    Specimen,
    byte_tokenizer,
    picture,
    qwen3,
    qwen_tokenizer,
    qwen_vl,
    qwen_vl_processor,
    seeded,
    sentence_tokenizer,
    t5,
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


def qwen_flow() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of Qwen-Image."""
    return by_resolution(max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)


def awake(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with its all-zero parameters made random and its matrices enlarged, so that all it is given matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)
            elif parameter.ndim > 1:
                parameter *= 2.0
    return model.eval()


# Qwen-Image -------------------------------------------------------------------------------------------------------


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


def qwen(kind: Callable[..., DiffusionPipeline] = QwenImagePipeline, transformer: dict | None = None, **parts):
    """A pipeline of Qwen-Image; `transformer` is what differs in the config of that, `parts` are further components."""
    return kind(
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        transformer=awake(QwenImageTransformer2DModel(**{**QWEN, **(transformer or {})})),
        **{"scheduler": qwen_flow(), "vae": qwen_vae(), **parts},
    )


def qwen_edit(kind: Callable[..., DiffusionPipeline], **config):
    """A pipeline of Qwen-Image that edits."""
    return qwen(kind, config, vae=large_scale_vae(), processor=qwen_vl_processor())


def qwen_controlnet() -> QwenImageControlNetPipeline:
    """Qwen-Image with a ControlNet."""
    return qwen(QwenImageControlNetPipeline, controlnet=awake(QwenImageControlNetModel(**{**QWEN, "num_layers": 1})))


def qwen_layered() -> QwenImageLayeredPipeline:
    """Qwen-Image that splits a picture into layers with transparency."""
    latent = 2 * LATENT  # other than the four channels of a picture, which the pipeline would take for latents
    config = {
        "in_channels": 4 * latent,
        "out_channels": latent,
        "use_layer3d_rope": True,
        "use_additional_t_cond": True,
    }
    return qwen(
        QwenImageLayeredPipeline,
        config,
        vae=large_scale_vae(channels=4, latent=latent),
        processor=qwen_vl_processor(),
        scheduler=by_resolution(max_shift=0.9, max_image_seq_len=8192),
    )


# Qwen 3 VL as text encoder ----------------------------------------------------------------------------------------


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


def qwen21() -> QwenImage21Pipeline:
    """Qwen-Image 2.1."""
    return QwenImage21Pipeline(
        scheduler=qwen_flow(),
        vae=AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=4, z_dim=LATENT, dim_mult=[1] * 5, num_res_blocks=1, **STATISTICS
        ).eval(),
        text_encoder=qwen3_vl(),
        processor=qwen3_vl_processor(),
        transformer=awake(
            QwenImage21Transformer2DModel(
                in_channels=LATENT, out_channels=LATENT, num_layers=2, context_in_dim=16, axes_dims_rope=AXES, **HEADS
            )
        ),
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


# FLUX.2's autoencoder ---------------------------------------------------------------------------------------------


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


# HunyuanImage -----------------------------------------------------------------------------------------------------

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


STEPS = {"num_inference_steps": 4}
SMALL = {**STEPS, "height": 16, "width": 16}
QWEN_CALL = {**SMALL, "true_cfg_scale": 1.0, "max_sequence_length": 256}
EDIT_CALL = {**STEPS, "height": 256, "width": 256, "true_cfg_scale": 1.0}
PICTURE = {"image": picture()}
CONTROL = {"control_image": picture(1)}

SPECIMENS: dict[str, Specimen] = {
    "QwenImagePipeline": Specimen(
        seeded(qwen), "text-to-image", {**QWEN_CALL, "true_cfg_scale": 3.0, "negative_prompt": "blurry"}
    ),
    "QwenImageEditPipeline": Specimen(
        seeded(lambda: qwen_edit(QwenImageEditPipeline)), "image-editing", EDIT_CALL, PICTURE
    ),
    "QwenImageEditPlusPipeline": Specimen(
        seeded(lambda: qwen_edit(QwenImageEditPlusPipeline, zero_cond_t=True)),
        "image-editing",
        EDIT_CALL,
        {"image": [picture(), picture(1)]},
    ),
    "QwenImageControlNetPipeline": Specimen(seeded(qwen_controlnet), "controlled text-to-image", QWEN_CALL, CONTROL),
    "QwenImageLayeredPipeline": Specimen(
        seeded(qwen_layered),
        "image-to-layers",
        {**STEPS, "layers": 1, "resolution": 640, "true_cfg_scale": 1.0, "max_sequence_length": 256},
        {"image": picture().convert("RGBA")},
    ),
    "QwenImage21Pipeline": Specimen(
        seeded(qwen21), "text-to-image", {**STEPS, "height": 32, "width": 32, "true_cfg_scale": 1.0}
    ),
    "QwenImage21Pipeline (editing)": Specimen(
        seeded(qwen21), "image-editing", {**STEPS, "output_resolution": 32, "true_cfg_scale": 1.0}, PICTURE
    ),
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
    "Krea2Pipeline": Specimen(
        seeded(krea2), "text-to-image", {**SMALL, "guidance_scale": 0.0, "max_sequence_length": 256}
    ),
    "HunyuanImagePipeline": Specimen(seeded(hunyuan_image), "text-to-image", SMALL),
    "HunyuanImagePipeline (distilled)": Specimen(
        seeded(lambda: hunyuan_image(distilled=True)), "text-to-image", {**SMALL, "distilled_guidance_scale": 3.25}
    ),
    "HunyuanImageRefinerPipeline": Specimen(
        seeded(hunyuan_refiner), "image-to-image", {**SMALL, "distilled_guidance_scale": 3.25}, PICTURE
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
