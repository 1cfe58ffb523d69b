"""Tiny pipelines of Stable Diffusion 3 and AuraFlow."""

from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3PAGPipeline,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextModelWithProjection,
)

from zoo.base import (
    Specimen,
    clip_text,
    sentence_tokenizer,
    t5,
    umt5,
)
from zoo.flux import GUIDED, HEADS, LENGTH, PLAIN, SMALL, autoencoder, lively


def aura_flow():
    """An AuraFlow."""
    return AuraFlowPipeline(
        transformer=AuraFlowTransformer2DModel(
            sample_size=8,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pos_embed_max_size=64,
            **HEADS,
        ),
        vae=autoencoder(4, scaling_factor=0.13025),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        text_encoder=umt5(),
        tokenizer=sentence_tokenizer(LENGTH),
    )


SD3 = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 8,
    **HEADS,
}


def sd3(kind=StableDiffusion3Pipeline, **parts):
    """A Stable Diffusion 3 with all of its three text encoders."""
    return kind(
        transformer=SD3Transformer2DModel(**SD3),
        vae=autoencoder(4, shift_factor=0.0609, scaling_factor=1.5305),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clip_text(CLIPTextModelWithProjection, length=LENGTH),
        text_encoder_2=clip_text(CLIPTextModelWithProjection, length=LENGTH),
        text_encoder_3=t5(),
        tokenizer=sentence_tokenizer(LENGTH),
        tokenizer_2=sentence_tokenizer(LENGTH),
        tokenizer_3=sentence_tokenizer(LENGTH),
        **parts,
    )


def sd3_controlnet():
    """A Stable Diffusion 3 with a control network."""
    return sd3(StableDiffusion3ControlNetPipeline, controlnet=SD3ControlNetModel(**SD3).eval())


def sd3_pag():
    """A Stable Diffusion 3 with perturbed attention guidance."""
    return sd3(StableDiffusion3PAGPipeline)


SPECIMENS: dict[str, Specimen] = {
    "AuraFlowPipeline": Specimen(lively(aura_flow), "text-to-image", PLAIN),
    "StableDiffusion3Pipeline": Specimen(lively(sd3), "text-to-image", GUIDED),
    "StableDiffusion3ControlNetPipeline": Specimen(
        lively(sd3_controlnet), "control-to-image", PLAIN, {"control_image": SMALL}
    ),
    "StableDiffusion3PAGPipeline": Specimen(lively(sd3_pag), "text-to-image", {**PLAIN, "pag_scale": 3.0}),
}
