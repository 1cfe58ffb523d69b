"""Tiny pipelines that make sound: Stable Audio 3, LongCat AudioDiT and ACE-Step."""

from __future__ import annotations

from functools import partial

import torch
from diffusers import (
    AceStepPipeline,
    AceStepTransformer1DModel,
    AutoencoderOobleck,
    AutoencoderSAME,
    FlowMatchEulerDiscreteScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTTransformer,
    LongCatAudioDiTVae,
    StableAudio3AudioToAudioPipeline,
    StableAudio3DiTModel,
    StableAudio3InpaintPipeline,
    StableAudio3Pipeline,
)
from diffusers.pipelines.ace_step import AceStepAudioTokenDetokenizer, AceStepAudioTokenizer, AceStepConditionEncoder
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder
from torch import nn
from transformers import Qwen3Model, T5GemmaConfig, T5GemmaEncoderModel, T5GemmaModuleConfig

from zoo.base import DECODER, Specimen, byte_tokenizer, qwen3, seeded, sentence_tokenizer, umt5

CHANNELS = 8  # of the latents
WIDTH = 16


def woken(model: nn.Module, std: float = 0.05) -> nn.Module:
    """The model with random numbers where its parameters begin as zeros."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=std)
    return model.eval()


def sound(samples: int, *batch: int) -> torch.Tensor:
    """A stereo wave of two tones."""
    time = torch.linspace(0, 40, samples)
    return torch.stack([time.sin(), (3 * time).cos()]).mul(0.5).expand(*batch, 2, samples).contiguous()


def stable_audio_3(kind, stochastic: bool = True):
    """Stable Audio 3; `stochastic` as its distilled checkpoint, else as its base."""
    text = T5GemmaModuleConfig(hidden_size=WIDTH, query_pre_attn_scalar=8, **DECODER)
    return kind(
        vae=woken(
            AutoencoderSAME(
                patch_size=8,
                encoder_channels=WIDTH,
                encoder_c_mults=(1,),
                encoder_strides=(4,),
                encoder_transformer_depths=(1,),
                latent_dim=CHANNELS,
                dim_heads=8,
                sampling_rate=640,
            ),
            std=0.3,
        ),
        text_encoder=T5GemmaEncoderModel(T5GemmaConfig(encoder=text, decoder=text, is_encoder_decoder=False)).eval(),
        tokenizer=sentence_tokenizer(32),
        duration_embedder=StableAudio3DurationEmbedder(output_dim=WIDTH, fourier_dim=8).eval(),
        transformer=woken(
            StableAudio3DiTModel(
                io_channels=CHANNELS,
                embed_dim=32,
                depth=2,
                num_heads=2,
                cond_token_dim=WIDTH,
                global_cond_dim=WIDTH,
                local_add_cond_dim=1 + CHANNELS,
                timestep_features_dim=16,
                num_memory_tokens=4,
            )
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0, stochastic_sampling=stochastic),
    )


def longcat() -> LongCatAudioDiTPipeline:
    """LongCat AudioDiT, whose time runs from 0 to 1."""
    return LongCatAudioDiTPipeline(
        vae=LongCatAudioDiTVae(
            channels=4,
            c_mults=[1, 2],
            strides=[4, 4],
            latent_dim=CHANNELS,
            encoder_latent_dim=2 * CHANNELS,
            downsampling_ratio=16,
            sample_rate=160,
        ).eval(),
        text_encoder=umt5(WIDTH),
        tokenizer=sentence_tokenizer(32),
        transformer=woken(
            LongCatAudioDiTTransformer(
                dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=WIDTH, latent_dim=CHANNELS, ff_mult=2.0
            )
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, invert_sigmas=True),
    )


def ace_step(turbo: bool = False) -> AceStepPipeline:
    """ACE-Step 1.5; `turbo` is the distilled one, which takes no guidance."""
    blocks = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 8,
    }
    condition = AceStepConditionEncoder(
        text_hidden_dim=WIDTH,
        timbre_hidden_dim=CHANNELS,
        num_lyric_encoder_hidden_layers=2,
        num_timbre_encoder_hidden_layers=2,
        **blocks,
    )
    condition.silence_latent.normal_(std=0.5)
    tokens = {"audio_acoustic_hidden_dim": CHANNELS, "num_attention_pooler_hidden_layers": 1, **blocks}
    return AceStepPipeline(
        vae=AutoencoderOobleck(
            encoder_hidden_size=2 * CHANNELS,
            downsampling_ratios=[4, 4],
            channel_multiples=[1, 2],
            decoder_channels=4,
            decoder_input_channels=CHANNELS,
            sampling_rate=64,
        ).eval(),
        text_encoder=qwen3(Qwen3Model, WIDTH),
        tokenizer=byte_tokenizer("<|endoftext|>", chat_template=None),
        transformer=woken(
            AceStepTransformer1DModel(
                num_hidden_layers=2,
                in_channels=3 * CHANNELS,
                audio_acoustic_hidden_dim=CHANNELS,
                is_turbo=turbo,
                **blocks,
            )
        ),
        condition_encoder=condition.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        audio_tokenizer=AceStepAudioTokenizer(fsq_dim=WIDTH, **tokens).eval(),
        audio_token_detokenizer=AceStepAudioTokenDetokenizer(**tokens).eval(),
    )


STABLE = {"num_inference_steps": 4, "duration": 0.5}
ACE = {"num_inference_steps": 4, "audio_duration": 2.0, "max_text_length": 192, "max_lyric_length": 64}

SPECIMENS: dict[str, Specimen] = {
    "StableAudio3Pipeline": Specimen(
        build=seeded(partial(stable_audio_3, StableAudio3Pipeline)),
        task="text-to-audio",
        call={**STABLE, "guidance_scale": 1.0},
    ),
    "StableAudio3Pipeline (base)": Specimen(
        build=seeded(partial(stable_audio_3, StableAudio3Pipeline, stochastic=False)),
        task="text-to-audio",
        call={**STABLE, "guidance_scale": 3.0},
    ),
    "LongCatAudioDiTPipeline": Specimen(
        build=seeded(longcat),
        task="text-to-audio",
        call={"num_inference_steps": 4, "audio_duration_s": 1.0, "guidance_scale": 3.0},
    ),
    "AceStepPipeline": Specimen(
        build=seeded(ace_step),
        task="text-to-audio",
        call={**ACE, "guidance_scale": 3.0},
        columns={"lyrics": "a fox, a fox"},
    ),
    "AceStepPipeline (turbo)": Specimen(
        build=seeded(partial(ace_step, turbo=True)),
        task="text-to-audio",
        call={**ACE, "guidance_scale": 1.0},
        columns={"lyrics": "a fox, a fox"},
    ),
    "AceStepPipeline (cover)": Specimen(
        build=seeded(partial(ace_step, turbo=True)),
        task="audio-to-audio",
        call={**ACE, "guidance_scale": 1.0, "task_type": "cover", "audio_cover_strength": 0.5},
        columns={"audio_codes": "<|audio_code_7|><|audio_code_2025|>", "lyrics": "a fox, a fox"},
    ),
    "StableAudio3InpaintPipeline": Specimen(
        build=seeded(partial(stable_audio_3, StableAudio3InpaintPipeline)),
        task="audio-inpainting",
        call={**STABLE, "mask_start_seconds": 0.1, "mask_end_seconds": 0.3},
        columns={"audio": sound(320, 1)},
    ),
    "StableAudio3AudioToAudioPipeline": Specimen(
        build=seeded(partial(stable_audio_3, StableAudio3AudioToAudioPipeline)),
        task="audio-to-audio",
        call={**STABLE, "init_noise_level": 1.0},
        columns={"audio": sound(320, 1)},
    ),
}
