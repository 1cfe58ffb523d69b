"""Picture pipelines: Sana, Lumina, CogView, HiDream, Kandinsky 5, PRX, OmniGen."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    CogView4ControlPipeline,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    Kandinsky5I2IPipeline,
    Kandinsky5T2IPipeline,
    Kandinsky5Transformer3DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    LuminaNextDiT2DModel,
    LuminaPipeline,
    OmniGenPipeline,
    OmniGenTransformer2DModel,
    PRXPipeline,
    PRXPixelPipeline,
    PRXTransformer2DModel,
    SanaControlNetModel,
    SanaControlNetPipeline,
    SanaPAGPipeline,
    SanaPipeline,
    SanaTransformer2DModel,
    UniPCMultistepScheduler,
)
from diffusers import DPMSolverMultistepScheduler as DPMSolver
from transformers import (
    CLIPTextModelWithProjection,
    GemmaConfig,
    GemmaModel,
    GlmConfig,
    GlmModel,
    LlamaForCausalLM,
    Qwen3Model,
    T5GemmaModuleConfig,
)
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from zoo.base import (
    DECODER,
    Specimen,
    byte_tokenizer,
    clip_text,
    gemma2,
    llama,
    picture,
    qwen3,
    qwen_tokenizer,
    qwen_vl,
    qwen_vl_processor,
    seeded,
    sentence_tokenizer,
    t5,
)

Euler = FlowMatchEulerDiscreteScheduler


def awake(model: torch.nn.Module) -> torch.nn.Module:
    """The model for evaluation, with small random numbers where a parameter is all zeros."""
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.05)
    return model.eval()


def kl(levels: int = 4, channels: int = 4, **factors: float) -> AutoencoderKL:
    """A VAE that shrinks a picture by 2 per level after the first."""
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
        block_out_channels=[8] * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=32,
        **factors,
    ).eval()


# Sana

SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 16,
}


def sana(kind=SanaPipeline, controlled: bool = False, **more):
    """Sana, with or without a control network or perturbed attention."""
    if controlled:
        more["controlnet"] = awake(SanaControlNetModel(**{**SANA, "num_layers": 1}))
    vae = AutoencoderDC(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.41407,
    )
    return kind(
        tokenizer=sentence_tokenizer(),
        text_encoder=gemma2(),
        vae=vae.eval(),
        transformer=awake(SanaTransformer2DModel(**SANA)),
        scheduler=DPMSolver(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        **more,
    )


# Lumina

GATED = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 16,
}


def lumina2():
    """Lumina Image 2."""
    transformer = Lumina2Transformer2DModel(
        **GATED, num_refiner_layers=1, cap_feat_dim=16, axes_dim_rope=(4, 2, 2), axes_lens=(64, 16, 16)
    )
    return Lumina2Pipeline(
        transformer=awake(transformer),
        scheduler=Euler(shift=6.0),
        vae=kl(shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=gemma2(),
        tokenizer=sentence_tokenizer(),
    )


def lumina():
    """Lumina Next."""
    transformer = LuminaNextDiT2DModel(**GATED, cross_attention_dim=16)
    torch.nn.init.normal_(transformer.pad_token)
    return LuminaPipeline(
        transformer=awake(transformer),
        scheduler=Euler(),
        vae=kl(),
        text_encoder=GemmaModel(GemmaConfig(hidden_size=16, **DECODER)).eval(),
        tokenizer=sentence_tokenizer(),
    )


# CogView


def cogview4(kind=CogView4Pipeline, channels: int = 4):
    """CogView 4; with control, the transformer takes twice the channels and the picture's latents have no seed."""
    transformer = CogView4Transformer2DModel(
        in_channels=channels,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
    )
    scheduler = Euler(base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear")
    tokenizer = sentence_tokenizer(length=64)
    tokenizer.padding_side = "left"
    return kind(
        tokenizer=tokenizer,
        text_encoder=GlmModel(GlmConfig(hidden_size=16, initializer_range=0.5, **DECODER)).eval(),
        vae=kl(2),
        transformer=awake(transformer),
        scheduler=scheduler,
    )


# HiDream


def hidream(scheduler):
    """HiDream, with the given scheduler, for pictures of 32 pixels a side."""
    transformer = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[32, 16],
        text_emb_dim=32,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(8, 8),
        llama_layers=[0, 1],
    )
    language = llama(kind=LlamaForCausalLM)
    language.set_attn_implementation("eager")
    made = HiDreamImagePipeline(
        scheduler=scheduler,
        vae=kl(shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=clip_text(CLIPTextModelWithProjection),
        tokenizer=sentence_tokenizer(),
        text_encoder_2=clip_text(CLIPTextModelWithProjection),
        tokenizer_2=sentence_tokenizer(),
        text_encoder_3=t5(),
        tokenizer_3=sentence_tokenizer(),
        text_encoder_4=language,
        tokenizer_4=sentence_tokenizer(),
        transformer=awake(transformer),
    )
    made.default_sample_size = 4
    return made


# Kandinsky


def kandinsky5(kind=Kandinsky5T2IPipeline, conditioned: bool = False):
    """Kandinsky 5 for pictures of 32 pixels a side, whose only resolution that is."""
    transformer = Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=16,
        time_dim=16,
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        visual_cond=conditioned,
    )
    made = kind(
        transformer=awake(transformer),
        vae=kl(scaling_factor=0.3611),
        text_encoder=qwen_vl(),
        tokenizer=qwen_vl_processor(),
        text_encoder_2=clip_text(length=77),
        tokenizer_2=sentence_tokenizer(length=77),
        scheduler=Euler(shift=3.0),
    )
    made.resolutions = [(32, 32)]
    return made


# PRX

PRX = {"context_in_dim": 16, "hidden_size": 16, "num_heads": 2, "depth": 2, "axes_dim": [4, 4]}


def prx():
    """PRX over the latents of a VAE."""
    encoder = T5GemmaEncoder(T5GemmaModuleConfig(hidden_size=16, query_pre_attn_scalar=8, dropout_rate=0.0, **DECODER))
    return PRXPipeline(
        transformer=awake(PRXTransformer2DModel(in_channels=4, **PRX)),
        scheduler=Euler(shift=3.0),
        text_encoder=encoder.eval(),
        tokenizer=sentence_tokenizer(length=24),
        vae=kl(2, shift_factor=0.1159, scaling_factor=0.3611),
    )


def prx_pixel():
    """PRX over pixels."""
    transformer = PRXTransformer2DModel(in_channels=3, patch_size=4, bottleneck_size=8, resolution_embeds=True, **PRX)
    return PRXPixelPipeline(
        transformer=awake(transformer),
        scheduler=Euler(shift=3.0),
        text_encoder=qwen3(Qwen3Model),
        tokenizer=qwen_tokenizer(),
        prompt_max_tokens=24,
    )


# OmniGen


def omnigen():
    """OmniGen, whose transformer reads the prompt itself."""
    transformer = OmniGenTransformer2DModel(
        in_channels=4,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_layers=2,
        pad_token_id=0,
        vocab_size=512,
        rope_scaling={"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
        pos_embed_max_size=8,
        time_step_dim=16,
    )
    return OmniGenPipeline(
        transformer=awake(transformer),
        scheduler=Euler(invert_sigmas=True, num_train_timesteps=1),
        vae=kl(),
        tokenizer=byte_tokenizer("<|user|>", "<|assistant|>", "<|diffusion|>", "<|end|>", "<img>", "</img>"),
    )


def of(side: int = 32, **more) -> dict:
    """Arguments of a call: four steps, a square picture and no guidance, unless said otherwise."""
    return {"num_inference_steps": 4, "height": side, "width": side, "guidance_scale": 1.0, **more}


def specimen(build, call: dict, task: str = "text-to-image", **columns) -> Specimen:
    """A specimen of this family."""
    return Specimen(build=seeded(build), task=task, call=call, columns=columns)


PLAIN = {"use_resolution_binning": False, "complex_human_instruction": None, "max_sequence_length": 16}
UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
EDIT = "image-editing"


SPECIMENS: dict[str, Specimen] = {
    "SanaPipeline": specimen(sana, of(**PLAIN)),
    "SanaControlNetPipeline": specimen(
        lambda: sana(SanaControlNetPipeline, controlled=True), of(**PLAIN), EDIT, control_image=picture()
    ),
    "Lumina2Pipeline": specimen(lumina2, of(guidance_scale=3.0, system_prompt="", max_sequence_length=32)),
    "CogView4Pipeline": specimen(cogview4, of(16, max_sequence_length=16)),
    "HiDreamImagePipeline": specimen(lambda: hidream(UniPCMultistepScheduler(**UNIPC)), of(max_sequence_length=16)),
    "HiDreamImagePipeline (Euler)": specimen(lambda: hidream(Euler(shift=3.0)), of(max_sequence_length=16)),
    "Kandinsky5T2IPipeline": specimen(kandinsky5, of(max_sequence_length=256)),
    "PRXPipeline": specimen(prx, of(16, use_resolution_binning=False)),
    "OmniGenPipeline": specimen(omnigen, of(guidance_scale=3.0)),
    "CogView4ControlPipeline": specimen(
        lambda: cogview4(CogView4ControlPipeline, 8), of(16, max_sequence_length=16), EDIT, control_image=picture()
    ),
    "LuminaPipeline": specimen(lumina, of(clean_caption=False)),
    "SanaPAGPipeline": specimen(lambda: sana(SanaPAGPipeline), of(guidance_scale=3.0, pag_scale=2.0, **PLAIN)),
    "PRXPixelPipeline": specimen(prx_pixel, of(16, use_resolution_binning=False)),
    "Kandinsky5I2IPipeline": specimen(
        lambda: kandinsky5(Kandinsky5I2IPipeline, conditioned=True),
        of(max_sequence_length=512),
        EDIT,
        image=picture(width=64, height=64),
    ),
}
