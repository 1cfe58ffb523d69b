"""Tiny pipelines of Cosmos, Sana Video and Motif Video, which share Wan's autoencoder."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLCosmos,
    ClassifierFreeGuidance,
    Cosmos2_5_PredictBasePipeline,
    Cosmos2TextToImagePipeline,
    Cosmos2VideoToWorldPipeline,
    CosmosTextToWorldPipeline,
    CosmosTransformer3DModel,
    CosmosVideoToWorldPipeline,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from transformers import T5Gemma2Encoder
from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2EncoderConfig

from zoo.base import (
    DECODER,
    Specimen,
    byte_tokenizer,
    gemma2,
    picture,
    qwen_tokenizer,
    qwen_vl,
    sentence_tokenizer,
    t5,
)
from zoo.wan import CALL, CHANNELS, HEADS, IMAGES, TEXT, TEXTS, UNGUIDED, filled, specimen, uni_pc, wan_vae, without


def sana_parts() -> dict:
    """The models of Sana Video."""
    transformer = SanaVideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
        rope_max_seq_len=32,
        **HEADS,
    )
    return {
        "tokenizer": byte_tokenizer(),
        "text_encoder": gemma2(16),
        "vae": wan_vae(),
        "transformer": filled(transformer),
    }


def sana() -> SanaVideoPipeline:
    """Sana Video."""
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    return SanaVideoPipeline(scheduler=scheduler, **sana_parts())


def sana_image() -> SanaImageToVideoPipeline:
    """Sana Video from a picture, which is the first latent frame."""
    return SanaImageToVideoPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=8.0), **sana_parts())


def t5_gemma2() -> T5Gemma2Encoder:
    """A T5Gemma 2 encoder; pictures, which nothing here gives it, it would see by a SigLIP."""
    text = {k: v for k, v in DECODER.items() if k != "intermediate_size"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return filled(
        T5Gemma2Encoder(
            T5Gemma2EncoderConfig(
                text_config={
                    **text,
                    "hidden_size": 16,
                    "intermediate_size": 32,
                    "query_pre_attn_scalar": 8,
                    "dropout_rate": 0.0,
                },
                vision_config={"model_type": "siglip_vision_model", **vision, "image_size": 16, "patch_size": 8},
                mm_tokens_per_image=4,
            )
        )
    )


def motif() -> MotifVideoPipeline:
    """Motif Video, whose guidance is a component."""
    transformer = MotifVideoTransformer3DModel(
        in_channels=2 * CHANNELS + 1,
        out_channels=CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=2,
        num_decoder_layers=1,
        mlp_ratio=1.0,
        text_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )
    return MotifVideoPipeline(
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=15.0),
        text_encoder=t5_gemma2(),
        tokenizer=byte_tokenizer(),
        transformer=filled(transformer),
        guider=ClassifierFreeGuidance(guidance_scale=3.0),
    )


class Unguarded:
    """A safety checker that lets all pass."""

    def to(self, *args, **kwargs) -> Unguarded:
        """Stays where it is."""
        return self

    def check_text_safety(self, prompt: str) -> bool:
        """Calls every prompt safe."""
        return True

    def check_video_safety(self, frames):
        """Returns the frames as they are."""
        return frames


def cosmos_transformer(channels: int = CHANNELS, **sizes) -> CosmosTransformer3DModel:
    """A transformer of Cosmos; one channel more than the latents' is the mask of given frames."""
    sizes = {"text_embed_dim": TEXT, "adaln_lora_dim": 4, "max_size": (4, 16, 16), "mlp_ratio": 1.0, **sizes}
    return filled(CosmosTransformer3DModel(in_channels=channels, out_channels=CHANNELS, **HEADS, **sizes))


def cosmos_texts() -> dict:
    """The text encoder of Cosmos 1 and 2 and the checker."""
    return {"tokenizer": sentence_tokenizer(), "text_encoder": t5(TEXT), "safety_checker": Unguarded()}


def cosmos_1_parts(channels: int = CHANNELS) -> dict:
    """The parts of Cosmos 1, which runs EDM."""
    widths = {"encoder_block_out_channels": (4, 4, 4, 4), "decode_block_out_channels": (4, 4, 4, 4)}
    statistics = {"latents_mean": [0.1] * 4 * CHANNELS, "latents_std": [0.8] * 4 * CHANNELS}
    vae = AutoencoderKLCosmos(latent_channels=CHANNELS, num_layers=1, attention_resolutions=(), **widths, **statistics)
    scheduler = EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, final_sigmas_type="sigma_min")
    return {
        "vae": filled(vae),
        "scheduler": scheduler,
        "transformer": cosmos_transformer(channels, extra_pos_embed_type="learnable"),
        **cosmos_texts(),
    }


def cosmos_2_parts(channels: int = CHANNELS) -> dict:
    """The parts of Cosmos 2."""
    return {
        "vae": wan_vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        "transformer": cosmos_transformer(channels, extra_pos_embed_type=None),
        **cosmos_texts(),
    }


def cosmos_text_to_world() -> CosmosTextToWorldPipeline:
    """Cosmos 1 from text."""
    return CosmosTextToWorldPipeline(**cosmos_1_parts())


def cosmos_video_to_world() -> CosmosVideoToWorldPipeline:
    """Cosmos 1 from a picture or video."""
    return CosmosVideoToWorldPipeline(**cosmos_1_parts(CHANNELS + 1))


def cosmos_2_text_to_image() -> Cosmos2TextToImagePipeline:
    """Cosmos 2 for pictures."""
    return Cosmos2TextToImagePipeline(**cosmos_2_parts())


def cosmos_2_video_to_world() -> Cosmos2VideoToWorldPipeline:
    """Cosmos 2 from a picture or video."""
    return Cosmos2VideoToWorldPipeline(**cosmos_2_parts(CHANNELS + 1))


def cosmos_2_5() -> Cosmos2_5_PredictBasePipeline:
    """Cosmos 2.5, conditioned on all layers of a Qwen 2.5 VL: here two of 16."""
    return Cosmos2_5_PredictBasePipeline(
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        vae=wan_vae(),
        scheduler=uni_pc(1.0, use_karras_sigmas=True, sigma_min=0.01, sigma_max=200.0),
        transformer=cosmos_transformer(
            CHANNELS + 1,
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=2 * 16,
            encoder_hidden_states_channels=TEXT,
        ),
        safety_checker=Unguarded(),
    )


SANA = {**UNGUIDED, "height": 32, "width": 32, "frames": 5, "max_sequence_length": 16}
SANA |= {"use_resolution_binning": False, "complex_human_instruction": None}


SPECIMENS: dict[str, Specimen] = {
    "SanaVideoPipeline": specimen(sana, TEXTS, SANA),
    "SanaImageToVideoPipeline": specimen(sana_image, IMAGES, SANA, image=picture()),
    "MotifVideoPipeline": specimen(motif, TEXTS, without(CALL, "guidance_scale")),
    "CosmosTextToWorldPipeline": specimen(cosmos_text_to_world, TEXTS, {**CALL, "num_frames": 9}),
    "CosmosVideoToWorldPipeline": specimen(cosmos_video_to_world, IMAGES, {**CALL, "num_frames": 9}, image=picture()),
    "Cosmos2TextToImagePipeline": specimen(cosmos_2_text_to_image, "text-to-image", without(CALL, "num_frames")),
    "Cosmos2VideoToWorldPipeline": specimen(cosmos_2_video_to_world, IMAGES, CALL, image=picture()),
    "Cosmos2_5_PredictBasePipeline": specimen(cosmos_2_5, TEXTS, {**CALL, "max_sequence_length": 128}),
    "Cosmos2_5_PredictBasePipeline (picture)": specimen(
        cosmos_2_5, IMAGES, {**CALL, "max_sequence_length": 128}, image=picture()
    ),
}
