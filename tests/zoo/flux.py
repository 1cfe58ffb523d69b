"""Tiny pipelines of the Flux family: packed latents, joint attention, dynamic shifts."""

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLWan,
    BriaFiboEditPipeline,
    BriaFiboPipeline,
    BriaFiboTransformer2DModel,
    BriaPipeline,
    BriaTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinKVPipeline,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxControlPipeline,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    LongCatImageEditPipeline,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
)
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3Model,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from zoo.base import (
    DECODER,
    Specimen,
    byte_tokenizer,
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

LENGTH = 32  # tokens of a prompt
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
BLOCKS = {"num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (4, 4, 8), **HEADS}


def lively(build):
    """A seeded builder of a pipeline whose weights are large enough that its output depends on every input."""

    def made():
        pipeline = build()
        for part in pipeline.components.values():
            for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
                elif not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.05)
        return pipeline

    return seeded(made)


def dynamic():
    """The scheduler of Flux, whose shift grows with the picture."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def autoencoder(channels, levels=(4, 8), kind=AutoencoderKL, **config):
    """An autoencoder that halves the picture at each level but the last, and is sure of its latents as trained ones are."""
    made = kind(
        latent_channels=channels,
        block_out_channels=levels,
        down_block_types=("DownEncoderBlock2D",) * len(levels),
        up_block_types=("UpDecoderBlock2D",) * len(levels),
        layers_per_block=1,
        norm_num_groups=2,
        **config,
    ).eval()
    made.quant_conv.bias.data[channels:] = -40.0
    return made


def shifted_autoencoder(channels, levels=(4, 8)):
    """An autoencoder whose latents are shifted and scaled, as those of Flux are."""
    return autoencoder(channels, levels, shift_factor=0.1159, scaling_factor=0.3611)


def flux(kind=FluxPipeline, in_channels=4, **parts):
    """A guidance-distilled Flux; `in_channels` counts the packed latents and what is concatenated to them."""
    return kind(
        transformer=FluxTransformer2DModel(
            in_channels=in_channels,
            out_channels=4,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=True,
            **BLOCKS,
        ),
        vae=shifted_autoencoder(1),
        scheduler=dynamic(),
        text_encoder=clip_text(length=LENGTH),
        text_encoder_2=t5(),
        tokenizer=sentence_tokenizer(LENGTH),
        tokenizer_2=sentence_tokenizer(LENGTH),
        **parts,
    )


def flux_kontext():
    """A Flux that sees a picture as further tokens."""
    return flux(FluxKontextPipeline)


def flux_control():
    """A Flux that sees a picture as further channels."""
    return flux(FluxControlPipeline, in_channels=8)


def flux_fill():
    """A Flux that sees the masked picture and the mask as further channels."""
    return flux(FluxFillPipeline, in_channels=4 + 4 + 16)


def flux_controlnet():
    """A Flux with a control network."""
    net = FluxControlNetModel(
        in_channels=4, joint_attention_dim=32, pooled_projection_dim=16, guidance_embeds=True, **BLOCKS
    )
    return flux(FluxControlNetPipeline, controlnet=net.eval())


def ending(tokenizer):
    """The tokenizer, set to keep the end of a text too long for it, as the prompt stands behind a system message."""
    tokenizer.truncation_side = "left"
    return tokenizer


def flux2_parts(**config):
    """What all forms of Flux 2 have beside their text encoder."""
    return {
        "transformer": Flux2Transformer2DModel(
            in_channels=8,
            joint_attention_dim=3 * 16,
            timestep_guidance_channels=32,
            **{**BLOCKS, "axes_dims_rope": (4, 4, 4, 4)},
            **config,
        ),
        "vae": autoencoder(2, kind=AutoencoderKLFlux2),
        "scheduler": dynamic(),
        "tokenizer": ending(qwen_tokenizer()),
    }


def flux2():
    """A guidance-distilled Flux 2, which reads its prompt by a Mistral 3."""
    config = Mistral3Config(
        text_config={"model_type": "mistral", "hidden_size": 16, **DECODER},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 32,
            "patch_size": 16,
        },
        image_token_index=qwen_tokenizer().convert_tokens_to_ids("<|image_pad|>"),
    )
    return Flux2Pipeline(text_encoder=Mistral3ForConditionalGeneration(config).eval(), **flux2_parts())


def flux2_klein(kind=Flux2KleinPipeline, **config):
    """A Flux 2 Klein, which reads its prompt by a Qwen 3."""
    return kind(text_encoder=qwen3(Qwen3ForCausalLM), **flux2_parts(guidance_embeds=False), **config)


def flux2_klein_kv():
    """A distilled Flux 2 Klein that sees its pictures in the first step and caches their keys and values."""
    return flux2_klein(Flux2KleinKVPipeline, is_distilled=True)


def chroma():
    """A Chroma: Flux with a T5 alone, and with real guidance."""
    return ChromaPipeline(
        transformer=ChromaTransformer2DModel(
            in_channels=4,
            joint_attention_dim=32,
            approximator_num_channels=16,
            approximator_hidden_dim=16,
            approximator_layers=1,
            **BLOCKS,
        ),
        vae=shifted_autoencoder(1),
        scheduler=dynamic(),
        text_encoder=t5(),
        tokenizer=sentence_tokenizer(LENGTH),
    )


def bria():
    """A Bria 3.2."""
    return BriaPipeline(
        transformer=BriaTransformer2DModel(in_channels=4, joint_attention_dim=32, **BLOCKS),
        vae=shifted_autoencoder(1),
        scheduler=dynamic(),
        text_encoder=t5(),
        tokenizer=sentence_tokenizer(LENGTH),
    )


def bria_fibo(kind=BriaFiboPipeline):
    """A Bria Fibo, which has a Wan autoencoder and shows each block a layer of its text encoder."""
    text = SmolLM3Config(hidden_size=8, **{**DECODER, "vocab_size": 128_001})  # an empty prompt is the token 128000
    return kind(
        transformer=BriaFiboTransformer2DModel(in_channels=4, joint_attention_dim=16, text_encoder_dim=8, **BLOCKS),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1] * 4,
            latents_std=[1.5] * 4,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
        ).eval(),
        scheduler=dynamic(),
        text_encoder=SmolLM3ForCausalLM(text).eval(),
        tokenizer=byte_tokenizer(),
    )


def bria_fibo_edit():
    """A Bria Fibo that sees a picture as further tokens."""
    return bria_fibo(BriaFiboEditPipeline)


def ovis():
    """An Ovis Image."""
    return OvisImagePipeline(
        transformer=OvisImageTransformer2DModel(in_channels=4, out_channels=4, joint_attention_dim=16, **BLOCKS),
        vae=shifted_autoencoder(1),
        scheduler=dynamic(),
        text_encoder=qwen3(Qwen3Model),
        tokenizer=ending(qwen_tokenizer()),
    )


def longcat(kind=LongCatImagePipeline, levels=(4, 8)):
    """A LongCat Image, whose latents always have 16 channels."""
    return kind(
        transformer=LongCatImageTransformer2DModel(
            in_channels=64, joint_attention_dim=16, pooled_projection_dim=16, **BLOCKS
        ),
        vae=shifted_autoencoder(16, levels),
        scheduler=dynamic(),
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        text_processor=qwen_vl_processor(),
    )


def longcat_edit():
    """A LongCat that edits a picture; its pictures always have 1024 pixels a side, so its latents are small."""
    return longcat(LongCatImageEditPipeline, levels=(2, 4, 4, 4, 4, 4, 4, 8))


CALL = {"num_inference_steps": 4, "height": 16, "width": 16, "max_sequence_length": LENGTH}
EMBEDDED = {**CALL, "guidance_scale": 3.5}  # the guidance is an input of the transformer
PLAIN = {**CALL, "guidance_scale": 1.0}
GUIDED = {**CALL, "guidance_scale": 3.0}
LAYERS = {"text_encoder_out_layers": (0, 1, 2)}
LONGCAT = {"num_inference_steps": 4, "guidance_scale": 1.0}
FIBO = {**GUIDED, "height": 64, "width": 64, "max_sequence_length": 256}
SMALL = picture(width=16, height=16)
LARGE = picture(width=64, height=64)  # Flux 2 refuses smaller ones

# Those whose prompts must be JSON with an "edit_instruction".
SPECIMENS: dict[str, Specimen] = {
    "BriaFiboEditPipeline": Specimen(
        lively(bria_fibo_edit),
        "image-editing",
        FIBO,
        {"image": picture()},
        ('{"edit_instruction": "a red fox in the snow"}', '{"edit_instruction": "a cat"}'),
    ),
    "FluxPipeline": Specimen(lively(flux), "text-to-image", EMBEDDED),
    "FluxPipeline (guided)": Specimen(
        lively(flux), "text-to-image", {**EMBEDDED, "true_cfg_scale": 3.0, "negative_prompt": "blurred"}
    ),
    "FluxKontextPipeline": Specimen(
        lively(flux_kontext), "image-editing", {**EMBEDDED, "max_area": 256, "_auto_resize": False}, {"image": SMALL}
    ),
    "FluxControlPipeline": Specimen(lively(flux_control), "control-to-image", EMBEDDED, {"control_image": SMALL}),
    "FluxControlNetPipeline": Specimen(lively(flux_controlnet), "control-to-image", EMBEDDED, {"control_image": SMALL}),
    "FluxFillPipeline": Specimen(
        lively(flux_fill), "inpainting", EMBEDDED, {"image": SMALL, "mask_image": picture(1).convert("L")}
    ),
    "Flux2Pipeline": Specimen(lively(flux2), "text-to-image", {**EMBEDDED, **LAYERS}),
    "Flux2Pipeline (edit)": Specimen(lively(flux2), "image-editing", {**EMBEDDED, **LAYERS}, {"image": [LARGE]}),
    "Flux2KleinPipeline": Specimen(lively(flux2_klein), "text-to-image", {**GUIDED, **LAYERS}),
    "Flux2KleinPipeline (edit)": Specimen(
        lively(flux2_klein), "image-editing", {**PLAIN, **LAYERS}, {"image": [LARGE]}
    ),
    "Flux2KleinKVPipeline": Specimen(lively(flux2_klein_kv), "image-editing", {**CALL, **LAYERS}, {"image": [LARGE]}),
    "ChromaPipeline": Specimen(lively(chroma), "text-to-image", GUIDED),
    "BriaPipeline": Specimen(lively(bria), "text-to-image", PLAIN),
    "BriaFiboPipeline": Specimen(lively(bria_fibo), "text-to-image", FIBO),
    "OvisImagePipeline": Specimen(lively(ovis), "text-to-image", PLAIN),
    "LongCatImagePipeline": Specimen(
        lively(longcat),
        "text-to-image",
        {**LONGCAT, "height": 16, "width": 16, "enable_prompt_rewrite": False},
    ),
    "LongCatImageEditPipeline": Specimen(lively(longcat_edit), "image-editing", LONGCAT, {"image": picture()}),
}
