"""Tiny pipelines of LTX and LTX 2."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from zoo.base import (
    DECODER,
    Specimen,
    picture,
    seeded,
    sentence_tokenizer,
    t5,
)
from zoo.video_parts import STEPS, siglip, stirred

LTX_CALL = {**STEPS, "height": 32, "width": 64, "num_frames": 9, "max_sequence_length": 16}
LTX_SCHEDULE = {"base_image_seq_len": 1024, "base_shift": 0.95, "max_image_seq_len": 4096, "max_shift": 2.05}


def ltx(kind, guided_vae: bool = False, **schedule):
    """An LTX pipeline; `guided_vae` has a decoder that takes a timestep and noise."""
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(**schedule),
        vae=stirred(
            AutoencoderKLLTXVideo(
                latent_channels=8,
                block_out_channels=(8, 8, 8, 8),
                decoder_block_out_channels=(8, 8, 8, 8),
                layers_per_block=(1, 1, 1, 1, 1),
                decoder_layers_per_block=(1, 1, 1, 1, 1),
                timestep_conditioning=guided_vae,
            )
        ),
        text_encoder=t5(),
        tokenizer=sentence_tokenizer(),
        transformer=stirred(
            LTXVideoTransformer3DModel(
                in_channels=8,
                out_channels=8,
                num_attention_heads=2,
                attention_head_dim=16,
                cross_attention_dim=32,
                num_layers=2,
                caption_channels=32,
            )
        ),
    )


def gemma3() -> Gemma3ForConditionalGeneration:
    """A Gemma 3."""
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={**DECODER, "hidden_size": 16, "query_pre_attn_scalar": 8, "sliding_window": 16},
            vision_config=siglip()["image_encoder"].config.to_dict(),
            mm_tokens_per_image=4,
        )
    ).eval()


def ltx2(kind):
    """An LTX 2 pipeline, which makes video and sound, each with its own scheduler."""
    rope = {"rope_double_precision": False, "rope_type": "split"}
    connector = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1, **LTX_SCHEDULE),
        vae=stirred(
            AutoencoderKLLTX2Video(
                latent_channels=8,
                block_out_channels=(8, 8, 8, 8),
                decoder_block_out_channels=(8, 16, 32),
                layers_per_block=(1, 1, 1, 1, 1),
                decoder_layers_per_block=(1, 1, 1, 1),
                spatial_compression_ratio=32,
                temporal_compression_ratio=8,
            )
        ),
        audio_vae=stirred(
            AutoencoderKLLTX2Audio(
                base_channels=4, ch_mult=(1, 1, 1), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
            )
        ),
        text_encoder=gemma3(),
        tokenizer=sentence_tokenizer(),
        connectors=stirred(
            LTX2TextConnectors(
                caption_channels=16,
                text_proj_in_factor=3,
                **{f"{part}_connector_{k}": v for part in ("video", "audio") for k, v in connector.items()},
                connector_rope_base_seq_len=32,
                **rope,
            )
        ),
        transformer=stirred(
            LTX2VideoTransformer3DModel(
                in_channels=8,
                out_channels=8,
                num_attention_heads=2,
                attention_head_dim=8,
                cross_attention_dim=16,
                audio_in_channels=4,
                audio_out_channels=4,
                audio_num_attention_heads=2,
                audio_attention_head_dim=4,
                audio_cross_attention_dim=8,
                num_layers=2,
                caption_channels=16,
                **rope,
            )
        ),
        vocoder=LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3]],
            output_sampling_rate=16000,
        ).eval(),
    )


LTX2_CALL = {
    **LTX_CALL,
    "height": 64,
    "width": 64,
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}


SPECIMENS: dict[str, Specimen] = {
    "LTXPipeline": Specimen(
        build=seeded(lambda: ltx(LTXPipeline, use_dynamic_shifting=True, shift_terminal=0.1, **LTX_SCHEDULE)),
        task="text-to-video",
        call={**LTX_CALL, "guidance_scale": 3.0},
    ),
    "LTXImageToVideoPipeline": Specimen(
        build=seeded(
            lambda: ltx(LTXImageToVideoPipeline, use_dynamic_shifting=True, shift_terminal=0.1, **LTX_SCHEDULE)
        ),
        task="image-to-video",
        call={**LTX_CALL, "guidance_scale": 1.0},
        columns={"image": picture()},
    ),
    "LTXConditionPipeline": Specimen(
        build=seeded(lambda: ltx(LTXConditionPipeline, guided_vae=True)),
        task="image-to-video",
        call={
            **LTX_CALL,
            "guidance_scale": 1.0,
            "decode_timestep": 0.05,
            "decode_noise_scale": 0.025,
            "image_cond_noise_scale": 0.0,
        },
        columns={"image": picture()},
    ),
    "LTX2Pipeline": Specimen(build=seeded(lambda: ltx2(LTX2Pipeline)), task="text-to-video", call=LTX2_CALL),
    "LTX2ImageToVideoPipeline": Specimen(
        build=seeded(lambda: ltx2(LTX2ImageToVideoPipeline)),
        task="image-to-video",
        call={**LTX2_CALL, "image_crf": 0},
        columns={"image": picture()},
    ),
}
