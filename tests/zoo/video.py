"""Video pipelines of the zoo: HunyuanVideo and its kin, LTX, Mochi, Kandinsky, EasyAnimate, Helios."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLMagvit,
    AutoencoderKLMochi,
    AutoencoderKLWan,
    ClassifierFreeGuidance,
    EasyAnimateInpaintPipeline,
    EasyAnimatePipeline,
    EasyAnimateTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HeliosPipeline,
    HeliosScheduler,
    HeliosTransformer3DModel,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
    Kandinsky6TI2VAPipeline,
    Kandinsky6Transformer3DModel,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
)
from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioVAE
from diffusers.models.autoencoders.mmaudio_vocoder import MMAudioVocoder
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import (
    ByT5Tokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from zoo.base import (
    DECODER,
    Specimen,
    byte_tokenizer,
    clip_pictures,
    clip_text,
    clip_vision,
    llama,
    picture,
    qwen_tokenizer,
    qwen_vl,
    qwen_vl_processor,
    seeded,
    sentence_tokenizer,
    t5,
    umt5,
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


def hunyuan_vae() -> AutoencoderKLHunyuanVideo:
    """The VAE of HunyuanVideo and Kandinsky 5: 4 frames and 8 x 8 pixels to a latent of 4 channels."""
    return AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    ).eval()


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


# LTX

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


# Mochi


def mochi():
    """A Mochi pipeline, whose scheduler counts from noise at 0 to video at 1."""
    return MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ).eval(),
        text_encoder=t5(),
        tokenizer=sentence_tokenizer(),
        transformer=stirred(
            MochiTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=2,
                pooled_projection_dim=16,
                text_embed_dim=32,
                time_embed_dim=32,
                max_sequence_length=16,
            )
        ),
    )


# Kandinsky 5

KANDINSKY5_CALL = {
    **STEPS,
    "height": 16,
    "width": 32,
    "num_frames": 5,
    "max_sequence_length": 32,
    "guidance_scale": 1.0,
}


def kandinsky5(kind):
    """A Kandinsky 5 pipeline, whose latents have channels last and carry the picture and its mask."""
    made = kind(
        transformer=stirred(
            Kandinsky5Transformer3DModel(
                in_visual_dim=4,
                out_visual_dim=4,
                in_text_dim=16,
                in_text_dim2=16,
                time_dim=16,
                model_dim=32,
                ff_dim=32,
                num_text_blocks=1,
                num_visual_blocks=2,
                axes_dims=(4, 6, 6),
                visual_cond=True,
            )
        ),
        vae=hunyuan_vae(),
        text_encoder=qwen_vl(),
        tokenizer=qwen_vl_processor(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        **clip_pair(),
    )
    made.prompt_template = "<|im_start|>user\n{}<|im_end|>"
    made.prompt_template_encode_start_idx = 6
    return made


# Kandinsky 6


def kandinsky6():
    """A Kandinsky 6 pipeline, which makes video and sound from a text, or from a picture too."""
    return Kandinsky6TI2VAPipeline(
        transformer=stirred(
            Kandinsky6Transformer3DModel(
                in_visual_dim=4,
                out_visual_dim=4,
                in_text_dim=16,
                in_text_dim2=16,
                time_dim=16,
                model_dim=32,
                ff_dim=32,
                num_text_blocks=1,
                num_visual_blocks=2,
                axes_dims=(4, 6, 6),
                in_audio_dim=4,
                out_audio_dim=4,
                visual_token_type_num_embeddings=2,
            )
        ),
        vae=hunyuan_vae(),
        text_encoder=qwen_vl(),
        tokenizer=qwen_vl_processor(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        audio_vae=stirred(MMAudioVAE(mel_bins=8, latent_channels=4, hidden_channels=8, layers_per_block=1, n_fft=64)),
        vocoder=MMAudioVocoder(
            num_mels=8,
            upsample_initial_channel=16,
            upsample_rates=(2, 2),
            upsample_kernel_sizes=(4, 4),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
        ).eval(),
        **clip_pair(),
    )


KANDINSKY6_CALL = {
    **KANDINSKY5_CALL,
    "max_sequence_length": 576,  # its template has 627 tokens here, of which the pipeline cuts 129
}


# EasyAnimate

EASYANIMATE_CALL = {**STEPS, "height": 16, "width": 32, "num_frames": 5}


def easyanimate(kind, in_channels: int = 4, **config):
    """An EasyAnimate pipeline."""
    return kind(
        vae=AutoencoderKLMagvit(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
        ).eval(),
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        transformer=stirred(
            EasyAnimateTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=16,
                in_channels=in_channels,
                out_channels=4,
                patch_size=2,
                num_layers=2,
                mmdit_layers=1,
                time_embed_dim=16,
                text_embed_dim=16,
                **config,
            )
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0, use_dynamic_shifting=True),
    )


def clip(seed: int = 0, frames: int = 5) -> torch.Tensor:
    """A video as a tensor of values between 0 and 1: rows, channels, frames, height, width."""
    pictures = np.stack([picture(seed + i, 32, 16) for i in range(frames)])
    return torch.from_numpy(pictures).permute(3, 0, 1, 2)[None] / 255


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


# Helios

HELIOS_CALL = {
    **STEPS,
    "height": 16,
    "width": 32,
    "num_frames": 5,
    "num_latent_frames_per_chunk": 2,
    "max_sequence_length": 16,
    "guidance_scale": 1.0,
}


def helios() -> HeliosPipeline:
    """A Helios pipeline, which makes a video chunk by chunk."""
    return HeliosPipeline(
        tokenizer=sentence_tokenizer(),
        text_encoder=umt5(),
        vae=AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval(),
        scheduler=HeliosScheduler(stages=1, stage_range=[0, 1], use_dynamic_shifting=True),
        transformer=stirred(
            HeliosTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=16,
                text_dim=32,
                freq_dim=16,
                ffn_dim=32,
                num_layers=2,
                rope_dim=(4, 6, 6),
            )
        ),
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
    "MochiPipeline": Specimen(
        build=seeded(mochi),
        task="text-to-video",
        call={**STEPS, "height": 16, "width": 32, "num_frames": 7, "max_sequence_length": 16, "guidance_scale": 1.0},
    ),
    "Kandinsky5T2VPipeline": Specimen(
        build=seeded(lambda: kandinsky5(Kandinsky5T2VPipeline)), task="text-to-video", call=KANDINSKY5_CALL
    ),
    "Kandinsky5I2VPipeline": Specimen(
        build=seeded(lambda: kandinsky5(Kandinsky5I2VPipeline)),
        task="image-to-video",
        call={**KANDINSKY5_CALL, "num_frames": 17},
        columns={"image": picture()},
    ),
    "HunyuanSkyreelsImageToVideoPipeline": Specimen(
        build=seeded(lambda: hunyuan(HunyuanSkyreelsImageToVideoPipeline, in_channels=8)),
        task="image-to-video",
        call={**HUNYUAN_CALL, "true_cfg_scale": 3.0, "negative_prompt": "bad", "prompt_template": TEMPLATE},
        columns={"image": picture()},
    ),
    "EasyAnimatePipeline": Specimen(
        build=seeded(lambda: easyanimate(EasyAnimatePipeline)),
        task="text-to-video",
        call={**EASYANIMATE_CALL, "guidance_scale": 1.0},
    ),
    "EasyAnimateInpaintPipeline": Specimen(
        build=seeded(lambda: easyanimate(EasyAnimateInpaintPipeline, 12, resize_inpaint_mask_directly=False)),
        task="video-to-video",
        call={**EASYANIMATE_CALL, "guidance_scale": 1.0},
        columns={"video": clip(), "mask_video": clip(1)[:, :1].round()},
    ),
    "HunyuanVideoFramepackPipeline": Specimen(
        build=seeded(framepack),
        task="image-to-video",
        call={**HUNYUAN_CALL, "latent_window_size": 2, "prompt_template": TEMPLATE},
        columns={"image": picture()},
    ),
    "Kandinsky6TI2VAPipeline": Specimen(build=seeded(kandinsky6), task="text-to-video", call=KANDINSKY6_CALL),
    "Kandinsky6TI2VAPipeline (picture)": Specimen(
        build=seeded(kandinsky6), task="image-to-video", call=KANDINSKY6_CALL, columns={"image": picture()}
    ),
    "HeliosPipeline": Specimen(build=seeded(helios), task="text-to-video", call=HELIOS_CALL),
    "HeliosPipeline (picture)": Specimen(
        build=seeded(helios), task="image-to-video", call=HELIOS_CALL, columns={"image": picture()}
    ),
}
