"""Wan and its kin, all tiny: Wan 2.1 and 2.2, SkyReels V2, ChronoEdit, Lucy Edit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from diffusers import (
    AutoencoderKLWan,
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    DiffusionPipeline,
    LucyEditPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from transformers import CLIPVisionModelWithProjection

from zoo.base import (
    Specimen,
    clip_pictures,
    clip_vision,
    picture,
    seeded,
    sentence_tokenizer,
    umt5,
)

M = TypeVar("M", bound=torch.nn.Module)

CHANNELS = 4  # of the latents
TEXT = 32  # width of the text encoders
PICTURE = 16  # width of the picture encoder
VIDEO = [picture(seed) for seed in range(5)]


@torch.no_grad()
def filled(model: M) -> M:
    """The model, zero parameters made random and matrices doubled, so that its output depends on all of it."""
    for p in model.parameters():
        if not p.any():
            p.normal_(std=0.05)
        elif p.ndim == 2:
            p.mul_(2)
    return model.eval()


def uni_pc(shift: float = 3.0, **settings) -> UniPCMultistepScheduler:
    """The scheduler that Wan ships."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, **settings
    )


def wan_vae(**sizes) -> AutoencoderKLWan:
    """Wan's autoencoder: 8 pixels and 4 frames to a latent."""
    statistics = {"latents_mean": [0.1, -0.2, 0.0, 0.3], "latents_std": [1.0, 1.5, 0.8, 1.2]}
    sizes = {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, **sizes}
    return filled(AutoencoderKLWan(z_dim=CHANNELS, **statistics, **sizes))


def wan_vae_16() -> AutoencoderKLWan:
    """The autoencoder of Wan 2.2 5B: 16 pixels and 4 frames to a latent."""
    return wan_vae(
        decoder_base_dim=4, is_residual=True, patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16
    )


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
WAN = {**HEADS, "text_dim": TEXT, "freq_dim": 32, "ffn_dim": 32, "out_channels": CHANNELS, "rope_max_seq_len": 32}
WITH_PICTURE = {"image_dim": PICTURE, "added_kv_proj_dim": 32}


def wan_transformer(kind: type[M] = WanTransformer3DModel, channels: int = CHANNELS, **sizes) -> M:
    """A transformer of Wan's kind."""
    return filled(kind(in_channels=channels, **{**WAN, **sizes}))


def wan_texts() -> dict:
    """Wan's tokenizer and text encoder."""
    return {"tokenizer": sentence_tokenizer(), "text_encoder": umt5(TEXT)}


def clip_parts(**kind) -> dict:
    """The picture encoder of the image-to-video kinds and its processor."""
    return {"image_encoder": clip_vision(width=PICTURE, **kind), "image_processor": clip_pictures()}


def wan() -> WanPipeline:
    """Wan 2.1: one transformer."""
    return WanPipeline(vae=wan_vae(), scheduler=uni_pc(), transformer=wan_transformer(), **wan_texts())


def wan_2_2() -> WanPipeline:
    """Wan 2.2: a transformer for the noisy steps, another for the rest."""
    return WanPipeline(
        vae=wan_vae(),
        scheduler=uni_pc(),
        transformer=wan_transformer(),
        transformer_2=wan_transformer(),
        boundary_ratio=0.875,
        **wan_texts(),
    )


def wan_5b() -> WanPipeline:
    """Wan 2.2 5B: a timestep per token."""
    return WanPipeline(
        vae=wan_vae_16(), scheduler=uni_pc(5.0), transformer=wan_transformer(), expand_timesteps=True, **wan_texts()
    )


def wan_image(**sizes) -> WanImageToVideoPipeline:
    """Wan 2.1 from a first picture; the transformer sees latents, mask and picture."""
    return WanImageToVideoPipeline(
        vae=wan_vae(),
        scheduler=uni_pc(),
        transformer=wan_transformer(channels=3 * CHANNELS, **WITH_PICTURE, **sizes),
        **wan_texts(),
        **clip_parts(),
    )


def wan_first_last() -> WanImageToVideoPipeline:
    """Wan 2.1 from a first and a last picture, of five tokens each."""
    return wan_image(pos_embed_seq_len=10)


def wan_image_2_2() -> WanImageToVideoPipeline:
    """Wan 2.2 from a picture: two transformers, no picture encoder."""
    return WanImageToVideoPipeline(
        vae=wan_vae(),
        scheduler=uni_pc(),
        transformer=wan_transformer(channels=3 * CHANNELS),
        transformer_2=wan_transformer(channels=3 * CHANNELS),
        boundary_ratio=0.9,
        **wan_texts(),
    )


def wan_image_5b() -> WanImageToVideoPipeline:
    """Wan 2.2 5B from a picture, which takes the place of the first latent frame."""
    return WanImageToVideoPipeline(
        vae=wan_vae_16(), scheduler=uni_pc(5.0), transformer=wan_transformer(), expand_timesteps=True, **wan_texts()
    )


def wan_video() -> WanVideoToVideoPipeline:
    """Wan 2.1 from a video with noise added."""
    return WanVideoToVideoPipeline(vae=wan_vae(), scheduler=uni_pc(), transformer=wan_transformer(), **wan_texts())


def vace() -> WanVACEPipeline:
    """Wan VACE: video, mask and references, two of its latents and 8 * 8 of mask."""
    transformer = wan_transformer(WanVACETransformer3DModel, vace_layers=[0], vace_in_channels=2 * CHANNELS + 64)
    return WanVACEPipeline(vae=wan_vae(), scheduler=uni_pc(), transformer=transformer, **wan_texts())


def animate() -> WanAnimatePipeline:
    """Wan Animate: a character, its poses and its face."""
    transformer = wan_transformer(
        WanAnimateTransformer3DModel,
        channels=2 * CHANNELS + 4,
        latent_channels=CHANNELS,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
        **WITH_PICTURE,
    )
    return WanAnimatePipeline(
        vae=wan_vae(), scheduler=uni_pc(5.0), transformer=transformer, **wan_texts(), **clip_parts()
    )


def lucy() -> LucyEditPipeline:
    """Lucy Edit: Wan 2.2 5B that sees a video beside the latents."""
    return LucyEditPipeline(
        vae=wan_vae_16(),
        scheduler=uni_pc(5.0),
        transformer=wan_transformer(channels=2 * CHANNELS),
        expand_timesteps=True,
        **wan_texts(),
    )


def chrono_edit() -> ChronoEditPipeline:
    """ChronoEdit: an edit as the last frame of a video."""
    return ChronoEditPipeline(
        vae=wan_vae(),
        scheduler=uni_pc(5.0),
        transformer=wan_transformer(ChronoEditTransformer3DModel, channels=3 * CHANNELS, **WITH_PICTURE),
        **wan_texts(),
        **clip_parts(),
    )


def sky_reels() -> SkyReelsV2Pipeline:
    """SkyReels V2."""
    return SkyReelsV2Pipeline(
        vae=wan_vae(), scheduler=uni_pc(8.0), transformer=wan_transformer(SkyReelsV2Transformer3DModel), **wan_texts()
    )


def sky_reels_image() -> SkyReelsV2ImageToVideoPipeline:
    """SkyReels V2 from a picture."""
    return SkyReelsV2ImageToVideoPipeline(
        vae=wan_vae(),
        scheduler=uni_pc(5.0),
        transformer=wan_transformer(SkyReelsV2Transformer3DModel, channels=3 * CHANNELS, **WITH_PICTURE),
        **wan_texts(),
        **clip_parts(kind=CLIPVisionModelWithProjection),
    )


def sky_reels_forcing() -> SkyReelsV2DiffusionForcingPipeline:
    """SkyReels V2 with a scheduler per latent frame."""
    return SkyReelsV2DiffusionForcingPipeline(
        vae=wan_vae(),
        scheduler=uni_pc(8.0),
        transformer=wan_transformer(SkyReelsV2Transformer3DModel),
        **wan_texts(),
    )


UNGUIDED = {"num_inference_steps": 4, "guidance_scale": 1.0}
CALL = {**UNGUIDED, "height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 16}
LARGE = {**CALL, "height": 64, "width": 64}
PICTURED = {**CALL, "max_sequence_length": 512}  # the attention to pictures takes the last 512 tokens for text


def without(call: dict, *names: str) -> dict:
    """The arguments but for some."""
    return {k: v for k, v in call.items() if k not in names}


def specimen(build: Callable[[], DiffusionPipeline], task: str, call: dict, **columns) -> Specimen:
    """A specimen whose weights are the same each time."""
    return Specimen(build=seeded(build), task=task, call=call, columns=columns)


TEXTS, IMAGES, EDITS = "text-to-video", "image-to-video", "video-to-video"


SPECIMENS: dict[str, Specimen] = {
    "WanPipeline": specimen(wan, TEXTS, CALL),
    "WanPipeline (2.2)": specimen(wan_2_2, TEXTS, {**CALL, "guidance_scale": 3.0, "guidance_scale_2": 2.0}),
    "WanPipeline (5B)": specimen(wan_5b, TEXTS, LARGE),
    "WanImageToVideoPipeline": specimen(wan_image, IMAGES, PICTURED, image=picture()),
    "WanImageToVideoPipeline (first and last frame)": specimen(
        wan_first_last, IMAGES, PICTURED, image=picture(), last_image=picture(1)
    ),
    "WanImageToVideoPipeline (2.2)": specimen(wan_image_2_2, IMAGES, CALL, image=picture()),
    "WanImageToVideoPipeline (5B)": specimen(wan_image_5b, IMAGES, LARGE, image=picture()),
    "WanVACEPipeline": specimen(
        vace, EDITS, CALL, video=VIDEO, mask=[picture(9)] * len(VIDEO), reference_images=[picture(5)]
    ),
    "WanAnimatePipeline": specimen(
        animate,
        IMAGES,
        {**without(PICTURED, "num_frames"), "segment_frame_length": 5},
        image=picture(),
        pose_video=VIDEO,
        face_video=[picture(seed, 16, 16) for seed in range(5, 10)],
    ),
    "WanVideoToVideoPipeline": specimen(
        wan_video, EDITS, {**without(CALL, "num_frames"), "strength": 0.8}, video=VIDEO
    ),
    "SkyReelsV2Pipeline": specimen(sky_reels, TEXTS, CALL),
    "SkyReelsV2ImageToVideoPipeline": specimen(sky_reels_image, IMAGES, PICTURED, image=picture()),
    "SkyReelsV2DiffusionForcingPipeline": specimen(sky_reels_forcing, TEXTS, CALL),
    "LucyEditPipeline": specimen(lucy, EDITS, LARGE, video=VIDEO),
    "ChronoEditPipeline": specimen(chrono_edit, "image-editing", PICTURED, image=picture()),
}
