"""Tiny pipelines that fill in a masked part of a picture, at full strength, so that they run their whole schedule."""

from __future__ import annotations

from functools import partial

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    ChromaInpaintPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxControlInpaintPipeline,
    FluxControlNetInpaintPipeline,
    FluxControlNetModel,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    FluxTransformer2DModel,
    QwenImageControlNetInpaintPipeline,
    QwenImageControlNetModel,
    QwenImageEditInpaintPipeline,
    QwenImageInpaintPipeline,
    QwenImageTransformer2DModel,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3ControlNetInpaintingPipeline,
    StableDiffusion3InpaintPipeline,
    ZImageControlNetInpaintPipeline,
    ZImageControlNetModel,
    ZImageInpaintPipeline,
    ZImageTransformer2DModel,
)
from PIL import Image
from torch import nn
from transformers import CLIPTextModelWithProjection, Qwen3Model

from zoo.base import (
    Specimen,
    clip_text,
    picture,
    qwen3,
    qwen_tokenizer,
    qwen_vl,
    qwen_vl_processor,
    seeded,
    sentence_tokenizer,
    t5,
)

SIDE = 16  # of a picture, in pixels
CHANNELS = 4  # of its latents
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
ROPE = {"axes_dims_rope": (4, 6, 6), **HEADS}
FLUX = {"num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32, **ROPE}


def woken(model: nn.Module) -> nn.Module:
    """The model with random numbers where its parameters begin as zeros."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return model.eval()


class Still:
    """An autoencoder whose posterior has no width, for pipelines that draw from it without the call's generator."""

    def encode(self, *args, **kwargs):
        """The posterior at its mean."""
        encoded = super().encode(*args, **kwargs)
        encoded.latent_dist.std = torch.zeros_like(encoded.latent_dist.std)
        return encoded


class StillKL(Still, AutoencoderKL):
    """The autoencoder of Stable Diffusion 3."""


class StillQwen(Still, AutoencoderKLQwenImage):
    """The autoencoder of Qwen-Image."""


class PooledQwen(AutoencoderKLQwenImage):
    """The autoencoder of Qwen-Image on pictures 32 times smaller, for the pipeline that makes them 1024 pixels wide."""

    def __init__(self, **config):
        super().__init__(**config)
        self.temperal_downsample = [False] * (5 + len(self.temperal_downsample))

    def encode(self, x, **kwargs):
        """The posterior of the small picture."""
        return super().encode(nn.functional.avg_pool3d(x, (1, 32, 32)), **kwargs)

    def decode(self, z, **kwargs):
        """The small picture, enlarged."""
        return (nn.functional.interpolate(super().decode(z, return_dict=False)[0], scale_factor=(1, 32, 32)),)


def autoencoder(channels=CHANNELS, shift=0.1159, scale=0.3611, kind=AutoencoderKL) -> AutoencoderKL:
    """A picture autoencoder that halves the side."""
    return kind(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 8),
        latent_channels=channels,
        norm_num_groups=2,
        shift_factor=shift,
        scaling_factor=scale,
    ).eval()


def dynamic() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of Flux."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def flux(kind, inputs: int = 1, **more):
    """Flux, whose transformer takes `inputs` pictures side by side in its channels."""
    return kind(
        scheduler=dynamic(),
        vae=autoencoder(),
        text_encoder=clip_text(length=32),
        tokenizer=sentence_tokenizer(32),
        text_encoder_2=t5(),
        tokenizer_2=sentence_tokenizer(32),
        transformer=woken(
            FluxTransformer2DModel(
                in_channels=4 * CHANNELS * inputs,
                out_channels=4 * CHANNELS,
                pooled_projection_dim=16,
                guidance_embeds=True,
                **FLUX,
            )
        ),
        **more,
    )


def flux_controlnet():
    """Flux with a control network."""
    net = FluxControlNetModel(in_channels=4 * CHANNELS, pooled_projection_dim=16, guidance_embeds=True, **FLUX)
    return flux(FluxControlNetInpaintPipeline, controlnet=woken(net))


def chroma() -> ChromaInpaintPipeline:
    """Chroma, whose pipeline reads `guidance_embeds` of a config that does not declare it."""
    transformer = ChromaTransformer2DModel(
        in_channels=4 * CHANNELS,
        approximator_num_channels=16,
        approximator_hidden_dim=16,
        approximator_layers=1,
        **FLUX,
    )
    transformer.register_to_config(guidance_embeds=False)
    return ChromaInpaintPipeline(
        scheduler=dynamic(),
        vae=autoencoder(),
        text_encoder=t5(),
        tokenizer=sentence_tokenizer(32),
        transformer=woken(transformer),
    )


SD3 = {
    "sample_size": SIDE // 2,
    "num_layers": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": SIDE // 2,
    **HEADS,
}


def sd3(kind, vae=AutoencoderKL, **more):
    """Stable Diffusion 3, which paints in with 16 channels only."""
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(16, shift=0.0609, scale=1.5305, kind=vae),
        text_encoder=clip_text(CLIPTextModelWithProjection, length=32),
        tokenizer=sentence_tokenizer(32),
        text_encoder_2=clip_text(CLIPTextModelWithProjection, length=32),
        tokenizer_2=sentence_tokenizer(32),
        text_encoder_3=t5(),
        tokenizer_3=sentence_tokenizer(32),
        transformer=woken(SD3Transformer2DModel(**SD3)),
        **more,
    )


def sd3_controlnet():
    """Stable Diffusion 3 with a control network that sees the mask in a further channel."""
    net = SD3ControlNetModel(extra_conditioning_channels=1, **SD3)
    return sd3(StableDiffusion3ControlNetInpaintingPipeline, StillKL, controlnet=woken(net))


QWEN = {"in_channels": 4 * CHANNELS, "out_channels": CHANNELS, "num_layers": 2, "joint_attention_dim": 16, **ROPE}


def qwen(kind, vae=AutoencoderKLQwenImage, **more):
    """Qwen-Image."""
    vae = vae(
        base_dim=4,
        z_dim=CHANNELS,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * CHANNELS,
        latents_std=[0.8] * CHANNELS,
    )
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        ),
        vae=vae.eval(),
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        transformer=woken(QwenImageTransformer2DModel(**QWEN)),
        **more,
    )


def qwen_edit():
    """Qwen-Image-Edit, which works at 1024 pixels a side whatever it is given."""
    return qwen(QwenImageEditInpaintPipeline, PooledQwen, processor=qwen_vl_processor())


def qwen_controlnet():
    """Qwen-Image with a control network that sees the mask in further channels."""
    net = QwenImageControlNetModel(extra_condition_channels=4, **QWEN)
    return qwen(QwenImageControlNetInpaintPipeline, StillQwen, controlnet=woken(net))


def z_image(kind, **more):
    """Z-Image."""
    transformer = ZImageTransformer2DModel(
        in_channels=CHANNELS,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 32, 32],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        nn.init.normal_(token, std=0.05)
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(),
        text_encoder=qwen3(Qwen3Model),
        tokenizer=qwen_tokenizer(),
        transformer=woken(transformer),
        **more,
    )


def z_image_controlnet():
    """Z-Image with a control network, which shares parts with the transformer."""
    net = ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=2 * CHANNELS + 1,
        add_control_noise_refiner="control_layers",
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    return z_image(ZImageControlNetInpaintPipeline, controlnet=woken(net))


HALF = Image.new("L", (SIDE, SIDE))
HALF.paste(255, (0, 0, SIDE // 2, SIDE))  # white, which is painted anew

CALL = {"num_inference_steps": 4, "height": SIDE, "width": SIDE, "max_sequence_length": 32}
OFF = {**CALL, "strength": 1.0, "guidance_scale": 1.0}
GUIDED = {**CALL, "strength": 1.0, "guidance_scale": 3.0}
LONG = {**CALL, "max_sequence_length": 256}  # room for a template of bytes
SCENE = {"image": picture(0, SIDE, SIDE), "mask_image": HALF}
CONTROL = {"control_image": picture(1, SIDE, SIDE)}
MASKED = {"control_image": picture(1, SIDE, SIDE), "control_mask": HALF}


def made(build, call: dict, columns: dict) -> Specimen:
    """A specimen of this family."""
    return Specimen(build=seeded(build), task="inpainting", call=call, columns=columns)


SPECIMENS: dict[str, Specimen] = {
    "FluxInpaintPipeline": made(partial(flux, FluxInpaintPipeline), OFF, SCENE),
    "FluxControlNetInpaintPipeline": made(flux_controlnet, OFF, {**SCENE, **CONTROL}),
    "FluxControlInpaintPipeline": made(partial(flux, FluxControlInpaintPipeline, inputs=2), OFF, {**SCENE, **CONTROL}),
    "FluxKontextInpaintPipeline": made(
        partial(flux, FluxKontextInpaintPipeline), {**OFF, "max_area": SIDE**2, "_auto_resize": False}, SCENE
    ),
    "FluxKontextInpaintPipeline (reference)": made(
        partial(flux, FluxKontextInpaintPipeline),
        {**OFF, "max_area": SIDE**2, "_auto_resize": False},
        {**SCENE, "image_reference": picture(2, SIDE, SIDE)},
    ),
    "ChromaInpaintPipeline": made(chroma, GUIDED, SCENE),
    "StableDiffusion3InpaintPipeline": made(partial(sd3, StableDiffusion3InpaintPipeline), GUIDED, SCENE),
    "StableDiffusion3ControlNetInpaintingPipeline": made(sd3_controlnet, {**CALL, "guidance_scale": 1.0}, MASKED),
    "QwenImageInpaintPipeline": made(
        partial(qwen, QwenImageInpaintPipeline), {**LONG, "strength": 1.0, "true_cfg_scale": 1.0}, SCENE
    ),
    "QwenImageEditInpaintPipeline": made(
        qwen_edit,
        {"num_inference_steps": 4, "max_sequence_length": 512, "strength": 1.0, "true_cfg_scale": 1.0},
        SCENE,
    ),
    "QwenImageControlNetInpaintPipeline": made(qwen_controlnet, {**LONG, "true_cfg_scale": 1.0}, MASKED),
    "ZImageInpaintPipeline": made(
        partial(z_image, ZImageInpaintPipeline), {**LONG, "strength": 1.0, "guidance_scale": 1.0}, SCENE
    ),
    "ZImageControlNetInpaintPipeline": made(z_image_controlnet, {**LONG, "guidance_scale": 1.0}, {**SCENE, **CONTROL}),
}
