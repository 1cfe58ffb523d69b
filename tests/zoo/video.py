"""Further video pipelines of the zoo: Mochi, Kandinsky, EasyAnimate, Helios."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import (
    AutoencoderKLMagvit,
    AutoencoderKLMochi,
    AutoencoderKLWan,
    EasyAnimateInpaintPipeline,
    EasyAnimatePipeline,
    EasyAnimateTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HeliosPipeline,
    HeliosScheduler,
    HeliosTransformer3DModel,
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
    Kandinsky6TI2VAPipeline,
    Kandinsky6Transformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
)
from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioVAE
from diffusers.models.autoencoders.mmaudio_vocoder import MMAudioVocoder

from zoo.base import (
    Specimen,
    picture,
    qwen_tokenizer,
    qwen_vl,
    qwen_vl_processor,
    seeded,
    sentence_tokenizer,
    t5,
    umt5,
)
from zoo.video_parts import STEPS, clip_pair, hunyuan_vae, stirred

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
    "Kandinsky6TI2VAPipeline": Specimen(build=seeded(kandinsky6), task="text-to-video", call=KANDINSKY6_CALL),
    "Kandinsky6TI2VAPipeline (picture)": Specimen(
        build=seeded(kandinsky6), task="image-to-video", call=KANDINSKY6_CALL, columns={"image": picture()}
    ),
    "HeliosPipeline": Specimen(build=seeded(helios), task="text-to-video", call=HELIOS_CALL),
    "HeliosPipeline (picture)": Specimen(
        build=seeded(helios), task="image-to-video", call=HELIOS_CALL, columns={"image": picture()}
    ),
}
