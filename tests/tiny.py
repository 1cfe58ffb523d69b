"""Tiny real pipelines with random weights, built from configs and own tokenizers; no network."""

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

WORDS = ["<pad>", "<start>", "<end>", "<unknown>", "a", "red", "blue", "green", "circle", "square", "of", "two"]


def tokenizer(length=8, words=WORDS):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[(word, words.index(word)) for word in ("<start>", "<end>")]
    )
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unknown>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=length, **names)


def clip(kind=CLIPTextModelWithProjection):
    return kind(
        CLIPTextConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, projection_dim=16, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def autoencoder(channels):
    return AutoencoderKL(
        latent_channels=channels, block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=2, shift_factor=0.0,
        scaling_factor=1.0,
    )  # fmt: skip


def sd3(shift=3.0):
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32,
        pos_embed_max_size=4,
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=transformer, vae=autoencoder(4), scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder=clip().eval(), text_encoder_2=clip().eval(), text_encoder_3=None,
        tokenizer=tokenizer(), tokenizer_2=tokenizer(), tokenizer_3=None,
    )  # fmt: skip


def sd3_inputs(transformer):
    config = transformer.config
    return {
        "hidden_states": torch.randn(1, config.in_channels, 8, 8),
        "encoder_hidden_states": torch.randn(1, 3, config.joint_attention_dim),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim),
        "timestep": torch.tensor([500.0]),
    }


def flux():
    """Packed latents, dynamic shift, embedded guidance: nothing of it is like SD3."""
    torch.manual_seed(0)
    t5 = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, pad_token_id=0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    return FluxPipeline(
        transformer=transformer, vae=autoencoder(1), text_encoder=clip(CLIPTextModel).eval(),
        text_encoder_2=T5EncoderModel(t5).eval(), tokenizer=tokenizer(), tokenizer_2=tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )  # fmt: skip


_SIZES = {"num_inference_steps": 4, "height": 16, "width": 16}
CALLS = {
    "sd3": {**_SIZES, "guidance_scale": 1.0, "max_sequence_length": 1},
    "sd3_guided": {**_SIZES, "guidance_scale": 3.0, "max_sequence_length": 1},
    "flux": {**_SIZES, "guidance_scale": 3.5, "max_sequence_length": 8},
}
PIPELINES = {"sd3": sd3, "sd3_guided": sd3, "flux": flux}
