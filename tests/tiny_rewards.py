"""Tiny real models that rewards hold, with random weights, saved as their libraries save them; no network."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BitImageProcessor,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    PreTrainedTokenizerFast,
)

WORDS = ["<pad>", "<unknown>", "a", "red", "blue", "circle", "square", "dog", "barks", "of", "two", "<start>", "<end>"]
PAD, START, END = 0, len(WORDS) - 2, len(WORDS) - 1


def save_tokenizer(folder, length):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", START), ("<end>", END)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unknown>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=length, **names).save_pretrained(folder)


def shaken(model, seed=0, scale=0.3):
    """The model with weights so large that different inputs give clearly different outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    return model


def save_clip(folder, seed=0):
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
    text = {**size, **special, "vocab_size": len(WORDS), "max_position_embeddings": 8}
    config = CLIPConfig(text_config=text, vision_config={**size, "image_size": 32, "patch_size": 8}, projection_dim=16)
    shaken(CLIPModel(config), seed).save_pretrained(folder)
    save_tokenizer(folder, 8)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def save_dino(folder):
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=7
    )
    shaken(Dinov2Model(config)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


CLAP_RATE, CLAP_SECONDS = 8000, 1


def save_clap(folder, fusion=False):
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    audio = {
        "patch_size": 2,
        "patch_stride": (2, 2),
        "num_mel_bins": 16,
        "spec_size": 64,
        "window_size": 4,
        "depths": (1, 1),
        "num_attention_heads": (2, 2),
        "num_hidden_layers": 2,
        "patch_embeds_hidden_size": 8,
        "hidden_size": 16,
        "enable_fusion": fusion,
        "fusion_type": "aff_2d" if fusion else None,
    }
    text |= {"vocab_size": len(WORDS), "max_position_embeddings": 20, "pad_token_id": PAD}
    shaken(ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=8)), scale=0.1).save_pretrained(
        folder
    )
    save_tokenizer(folder, 16)
    ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=CLAP_RATE,
        hop_length=100,
        max_length_s=CLAP_SECONDS,
        fft_window_size=256,
        frequency_max=4000,
        truncation="fusion" if fusion else "rand_trunc",
    ).save_pretrained(folder)
    return folder
