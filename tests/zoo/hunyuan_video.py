"""Tiny pipelines of HunyuanVideo, HunyuanVideo 1.5, Framepack and SkyReels."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from zoo.base import (
    Specimen,
    byte_tokenizer,
    clip_pictures,
    clip_vision,
    llama,
    picture,
    qwen_tokenizer,
    qwen_vl,
    seeded,
    t5,
)
from zoo.video_parts import STEPS, clip_pair, hunyuan_vae, siglip, stirred

# HunyuanVideo

HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>")
TEMPLATE = {"template": "<|start_header_id|>u<|end_header_id|>{}<|eot_id|>", "crop_start": 3}
IMAGE_TEMPLATE = {
    "template": "<|start_header_id|>s<|end_header_id|><image><|eot_id|><|start_header_id|>u<|end_header_id|>{}<|eot_id|>"
    "<|start_header_id|>a<|end_header_id|>",
    "crop_start": 8,
    "image_emb_start": 3,
    "image_emb_end": 7,
    "image_emb_len": 4,
}
HUNYUAN = {
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "rope_axes_dim": (4, 6, 6),
}
HUNYUAN_CALL = {**STEPS, "height": 16, "width": 32, "num_frames": 5, "max_sequence_length": 32}


def hunyuan(kind, in_channels: int = 4, condition: str | None = None, guidance_embeds: bool = True):
    """A HunyuanVideo pipeline; `condition` is how its transformer takes a picture."""
    vision = kind is HunyuanVideoImageToVideoPipeline
    return kind(
        text_encoder=llava() if vision else llama(layers=3),
        tokenizer=byte_tokenizer(*HEADERS),
        transformer=stirred(
            HunyuanVideoTransformer3DModel(
                **HUNYUAN,
                in_channels=in_channels,
                num_single_layers=1,
                pooled_projection_dim=16,
                guidance_embeds=guidance_embeds,
                image_condition_type=condition,
            )
        ),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        **clip_pair(),
        **({"image_processor": clip_pictures()} if vision else {}),
    )


def llava() -> LlavaForConditionalGeneration:
    """A Llava that reads a picture as 4 tokens."""
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=clip_vision().config,
            text_config=llama(layers=3).config,
            image_token_index=byte_tokenizer(*HEADERS).convert_tokens_to_ids("<image>"),
            image_seq_length=4,
            pad_token_id=0,
        )
    ).eval()


# HunyuanVideo 1.5

HUNYUAN15_CALL = {**STEPS, "num_frames": 5}


def hunyuan15(kind, guidance_scale: float = 1.0):
    """A HunyuanVideo 1.5 pipeline, whose guider does the guidance."""
    vision = kind is HunyuanVideo15ImageToVideoPipeline
    made = kind(
        text_encoder=qwen_vl().model.language_model,
        tokenizer=qwen_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=ByT5Tokenizer(),
        transformer=stirred(
            HunyuanVideo15Transformer3DModel(
                **HUNYUAN,
                in_channels=9,
                text_embed_2_dim=32,
                image_embed_dim=16,
                target_size=32,
                task_type="i2v" if vision else "t2v",
            )
        ),
        vae=AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=guidance_scale),
        **(siglip() if vision else {}),
    )
    made.system_message = "s"
    made.prompt_template_encode_start_idx = 17
    made.tokenizer_max_length, made.tokenizer_2_max_length, made.vision_num_semantic_tokens = 32, 8, 4
    return made


# HunyuanVideo Framepack


def framepack() -> HunyuanVideoFramepackPipeline:
    """A Framepack pipeline, which makes a video section by section."""
    return HunyuanVideoFramepackPipeline(
        text_encoder=llama(layers=3),
        tokenizer=byte_tokenizer(*HEADERS),
        transformer=stirred(
            HunyuanVideoFramepackTransformer3DModel(
                **HUNYUAN,
                in_channels=4,
                num_single_layers=1,
                pooled_projection_dim=16,
                has_image_proj=True,
                image_proj_dim=16,
                has_clean_x_embedder=True,
            )
        ),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        **clip_pair(),
        **siglip(),
    )


SPECIMENS: dict[str, Specimen] = {
    "HunyuanVideoPipeline": Specimen(
        build=seeded(lambda: hunyuan(HunyuanVideoPipeline)),
        task="text-to-video",
        call={**HUNYUAN_CALL, "prompt_template": TEMPLATE},
    ),
    "HunyuanVideoImageToVideoPipeline": Specimen(
        build=seeded(lambda: hunyuan(HunyuanVideoImageToVideoPipeline, condition="token_replace")),
        task="image-to-video",
        call={**HUNYUAN_CALL, "guidance_scale": 6.0, "prompt_template": IMAGE_TEMPLATE},
        columns={"image": picture()},
    ),
    "HunyuanVideoImageToVideoPipeline (33 channels)": Specimen(
        build=seeded(lambda: hunyuan(HunyuanVideoImageToVideoPipeline, 9, "latent_concat", guidance_embeds=False)),
        task="image-to-video",
        call={**HUNYUAN_CALL, "num_frames": 9, "prompt_template": IMAGE_TEMPLATE},
        columns={"image": picture()},
    ),
    "HunyuanVideo15Pipeline": Specimen(
        build=seeded(lambda: hunyuan15(HunyuanVideo15Pipeline, guidance_scale=3.0)),
        task="text-to-video",
        call={**HUNYUAN15_CALL, "height": 16, "width": 32},
    ),
    "HunyuanVideo15ImageToVideoPipeline": Specimen(
        build=seeded(lambda: hunyuan15(HunyuanVideo15ImageToVideoPipeline)),
        task="image-to-video",
        call=HUNYUAN15_CALL,
        columns={"image": picture()},
    ),
    "HunyuanSkyreelsImageToVideoPipeline": Specimen(
        build=seeded(lambda: hunyuan(HunyuanSkyreelsImageToVideoPipeline, in_channels=8)),
        task="image-to-video",
        call={**HUNYUAN_CALL, "true_cfg_scale": 3.0, "negative_prompt": "bad", "prompt_template": TEMPLATE},
        columns={"image": picture()},
    ),
    "HunyuanVideoFramepackPipeline": Specimen(
        build=seeded(framepack),
        task="image-to-video",
        call={**HUNYUAN_CALL, "latent_window_size": 2, "prompt_template": TEMPLATE},
        columns={"image": picture()},
    ),
}
