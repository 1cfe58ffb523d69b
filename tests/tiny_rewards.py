"""Tiny real models that rewards hold, with random weights, saved as their libraries save them; no network."""

import json

import open_clip
import tiny_vision_language
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


def shaken(make, scale=0.3):
    """Make weights so large that different inputs give clearly different outputs, always the same."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            if parameter.ndim:
                parameter.add_(torch.randn_like(parameter), alpha=scale)
    return model


def save_clip(folder):
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
    text = {**size, **special, "vocab_size": len(WORDS), "max_position_embeddings": 8}
    config = CLIPConfig(text_config=text, vision_config={**size, "image_size": 32, "patch_size": 8}, projection_dim=16)
    shaken(lambda: CLIPModel(config)).save_pretrained(folder)
    save_tokenizer(folder, 8)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def save_dino(folder):
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=7
    )
    shaken(lambda: Dinov2Model(config)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


CLAP_RATE, CLAP_SECONDS = 8000, 1


def save_clap(folder, fusion=False):
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    audio = {
        "patch_size": 2, "patch_stride": (2, 2), "num_mel_bins": 16, "spec_size": 64, "window_size": 4, "depths": (1, 1),
        "num_attention_heads": (2, 2), "num_hidden_layers": 2, "patch_embeds_hidden_size": 8, "hidden_size": 16,
        "enable_fusion": fusion, "fusion_type": "aff_2d" if fusion else None,
    }  # fmt: skip
    text |= {"vocab_size": len(WORDS), "max_position_embeddings": 20, "pad_token_id": PAD}
    config = ClapConfig(text_config=text, audio_config=audio, projection_dim=8)
    shaken(lambda: ClapModel(config), 0.1).save_pretrained(folder)
    save_tokenizer(folder, 16)
    ClapFeatureExtractor(
        feature_size=16, sampling_rate=CLAP_RATE, hop_length=100, max_length_s=CLAP_SECONDS, fft_window_size=256,
        frequency_max=4000, truncation="fusion" if fusion else "rand_trunc",
    ).save_pretrained(folder)  # fmt: skip
    return folder


def save_open_clip(folder):
    """Save weights of `tiny-open-clip`, and register this architecture with open_clip."""
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    (folder / "tiny-open-clip.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "tiny-open-clip.json")
    weights = shaken(lambda: open_clip.create_model("tiny-open-clip")).state_dict()
    torch.save({"state_dict": weights}, folder / "HPS_v2.1_compressed.pt")
    return folder / "HPS_v2.1_compressed.pt"


def drawn(shapes, seed=0):
    """Draw weights of deviation 1 / sqrt(inputs) by name; those of norms and biases have one dimension."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
        for name, shape in shapes.items()
    }


def head_shapes(prefix, width):
    shapes = {}
    sizes = {0: (1024, width), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}
    for layer, (out, into) in sizes.items():
        shapes |= {f"{prefix}{layer}.weight": (out, into), f"{prefix}{layer}.bias": (out,)}
    return shapes


def image_reward_weights(vision=128, text=64, layers=2, patch=16, grid=2):
    """Make a small checkpoint by the names of the authors' files, extra entries included."""
    eyes, read = "blip.visual_encoder.", "blip.text_encoder."
    shapes = {
        f"{eyes}cls_token": (1, 1, vision),
        f"{eyes}pos_embed": (1, grid * grid + 1, vision),
        f"{eyes}patch_embed.proj.weight": (vision, 3, patch, patch),
        f"{eyes}patch_embed.proj.bias": (vision,),
        f"{read}embeddings.word_embeddings.weight": (len(WORDS), text),
        f"{read}embeddings.position_embeddings.weight": (40, text),
        "blip.vision_proj.weight": (8, vision),
        "blip.text_proj.weight": (8, text),
    }

    def linear(name, out, into):
        return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}

    def norm(name, width):
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    shapes |= norm(f"{eyes}norm", vision) | norm(f"{read}embeddings.LayerNorm", text)
    for i in range(layers):
        block = f"{eyes}blocks.{i}."
        shapes |= norm(f"{block}norm1", vision) | norm(f"{block}norm2", vision)
        shapes |= linear(f"{block}attn.qkv", 3 * vision, vision) | linear(f"{block}attn.proj", vision, vision)
        shapes |= linear(f"{block}mlp.fc1", 2 * vision, vision) | linear(f"{block}mlp.fc2", vision, 2 * vision)
        layer = f"{read}encoder.layer.{i}."
        for kind, width in (("attention", text), ("crossattention", vision)):
            shapes |= linear(f"{layer}{kind}.self.query", text, text)
            shapes |= linear(f"{layer}{kind}.self.key", text, width) | linear(f"{layer}{kind}.self.value", text, width)
            shapes |= linear(f"{layer}{kind}.output.dense", text, text) | norm(f"{layer}{kind}.output.LayerNorm", text)
        shapes |= linear(f"{layer}intermediate.dense", 2 * text, text) | linear(f"{layer}output.dense", text, 2 * text)
        shapes |= norm(f"{layer}output.LayerNorm", text)
    weights = drawn(shapes | head_shapes("mlp.layers.", text))
    return weights | {f"{read}embeddings.position_ids": torch.arange(40)[None]}


def options(name, folder):
    """Save a tiny model in `folder`, and return the options with which `name` holds it."""
    folder.mkdir(exist_ok=True)
    if name in ("clip_score", "pickscore"):
        return {"path": str(save_clip(folder))}
    if name in ("image_similarity", "diversity"):
        return {"path": str(save_dino(folder))}
    if name == "clap":
        return {"path": str(save_clap(folder))}
    if name == "image_reward":
        torch.save(image_reward_weights(), folder / "ImageReward.pt")
        save_tokenizer(folder, 64)
        return {"path": str(folder), "tokenizer": str(folder)}
    if name == "hpsv3":
        return tiny_vision_language.save_hpsv3(folder, whole_words=True)
    if name == "hpsv3_plus":
        return tiny_vision_language.save_hpsv3_plus(folder, whole_words=True)
    clip = save_open_clip(folder)
    if name == "hpsv2":
        return {"path": str(clip), "architecture": "tiny-open-clip"}
    torch.save(drawn(head_shapes("layers.", 16)), folder / "aesthetic-model.pth")
    return {"path": str(folder), "architecture": "tiny-open-clip", "clip": str(clip)}


NAMES = (
    "clip_score", "pickscore", "hpsv2", "hpsv3", "hpsv3_plus", "aesthetic", "image_reward", "image_similarity", "diversity",
    "clap",
)  # fmt: skip
