"""Tiny pipelines of Qwen-Image."""

from __future__ import annotations

from collections.abc import Callable

from diffusers import (
    AutoencoderKLQwenImage21,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageControlNetModel,
    QwenImageControlNetPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from zoo.base import (
    Specimen,
    picture,
    qwen_tokenizer,
    qwen_vl,
    qwen_vl_processor,
    seeded,
)
from zoo.qwen_parts import (
    AXES,
    CONTROL,
    HEADS,
    LATENT,
    PICTURE,
    QWEN,
    SMALL,
    STATISTICS,
    STEPS,
    awake,
    by_resolution,
    large_scale_vae,
    qwen3_vl,
    qwen3_vl_processor,
    qwen_vae,
)


def qwen_flow() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of Qwen-Image."""
    return by_resolution(max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)


def qwen(kind: Callable[..., DiffusionPipeline] = QwenImagePipeline, transformer: dict | None = None, **parts):
    """A pipeline of Qwen-Image; `transformer` is what differs in the config of that, `parts` are further components."""
    return kind(
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        transformer=awake(QwenImageTransformer2DModel(**{**QWEN, **(transformer or {})})),
        **{"scheduler": qwen_flow(), "vae": qwen_vae(), **parts},
    )


def qwen_edit(kind: Callable[..., DiffusionPipeline], **config):
    """A pipeline of Qwen-Image that edits."""
    return qwen(kind, config, vae=large_scale_vae(), processor=qwen_vl_processor())


def qwen_controlnet() -> QwenImageControlNetPipeline:
    """Qwen-Image with a ControlNet."""
    return qwen(QwenImageControlNetPipeline, controlnet=awake(QwenImageControlNetModel(**{**QWEN, "num_layers": 1})))


def qwen_layered() -> QwenImageLayeredPipeline:
    """Qwen-Image that splits a picture into layers with transparency."""
    latent = 2 * LATENT  # other than the four channels of a picture, which the pipeline would take for latents
    config = {
        "in_channels": 4 * latent,
        "out_channels": latent,
        "use_layer3d_rope": True,
        "use_additional_t_cond": True,
    }
    return qwen(
        QwenImageLayeredPipeline,
        config,
        vae=large_scale_vae(channels=4, latent=latent),
        processor=qwen_vl_processor(),
        scheduler=by_resolution(max_shift=0.9, max_image_seq_len=8192),
    )


def qwen21() -> QwenImage21Pipeline:
    """Qwen-Image 2.1."""
    return QwenImage21Pipeline(
        scheduler=qwen_flow(),
        vae=AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=4, z_dim=LATENT, dim_mult=[1] * 5, num_res_blocks=1, **STATISTICS
        ).eval(),
        text_encoder=qwen3_vl(),
        processor=qwen3_vl_processor(),
        transformer=awake(
            QwenImage21Transformer2DModel(
                in_channels=LATENT, out_channels=LATENT, num_layers=2, context_in_dim=16, axes_dims_rope=AXES, **HEADS
            )
        ),
    )


QWEN_CALL = {**SMALL, "true_cfg_scale": 1.0, "max_sequence_length": 256}
EDIT_CALL = {**STEPS, "height": 256, "width": 256, "true_cfg_scale": 1.0}


SPECIMENS: dict[str, Specimen] = {
    "QwenImagePipeline": Specimen(
        seeded(qwen), "text-to-image", {**QWEN_CALL, "true_cfg_scale": 3.0, "negative_prompt": "blurry"}
    ),
    "QwenImageEditPipeline": Specimen(
        seeded(lambda: qwen_edit(QwenImageEditPipeline)), "image-editing", EDIT_CALL, PICTURE
    ),
    "QwenImageEditPlusPipeline": Specimen(
        seeded(lambda: qwen_edit(QwenImageEditPlusPipeline, zero_cond_t=True)),
        "image-editing",
        EDIT_CALL,
        {"image": [picture(), picture(1)]},
    ),
    "QwenImageControlNetPipeline": Specimen(seeded(qwen_controlnet), "controlled text-to-image", QWEN_CALL, CONTROL),
    "QwenImageLayeredPipeline": Specimen(
        seeded(qwen_layered),
        "image-to-layers",
        {**STEPS, "layers": 1, "resolution": 640, "true_cfg_scale": 1.0, "max_sequence_length": 256},
        {"image": picture().convert("RGBA")},
    ),
    "QwenImage21Pipeline": Specimen(
        seeded(qwen21), "text-to-image", {**STEPS, "height": 32, "width": 32, "true_cfg_scale": 1.0}
    ),
    "QwenImage21Pipeline (editing)": Specimen(
        seeded(qwen21), "image-editing", {**STEPS, "output_resolution": 32, "true_cfg_scale": 1.0}, PICTURE
    ),
}
