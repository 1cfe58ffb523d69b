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
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
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


def head_shapes(prefix, width, last=7):
    shapes = {}
    sizes = {0: (1024, width), 2: (128, 1024), 4: (64, 128), 6: (16, 64), last: (1, 16)}
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


def save_siglip(folder):
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**size, "vocab_size": len(WORDS), "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
    config = SiglipConfig(text_config=text, vision_config={**size, "image_size": 32, "patch_size": 8})
    shaken(lambda: SiglipModel(config)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    torch.save(drawn(head_shapes("scoring_head.", 16, last=8)), folder / "head.pth")
    return folder


DEQA = {
    "model_type": "mplug_owl2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "attention_bias": False, "rope_scaling": None, "softkl_loss": True,
    "visual_config": {
        "visual_model": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
            "patch_size": 14, "layer_norm_eps": 1e-6, "attention_dropout": 0.0,
        },
        "visual_abstractor": {
            "num_learnable_queries": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 24, "encoder_hidden_size": 16, "grid_size": 4, "layer_norm_eps": 1e-6,
            "attention_probs_dropout_prob": 0.0,
        },
    },
}  # fmt: skip


def deqa_weights(width=32, inner=48, eye=16, eye_inner=24, queries=4, layers=2):
    """Make a small checkpoint by the names of DeQA-Score's files, in the sizes of `DEQA`."""
    shapes = {
        "model.embed_tokens.weight": (32000, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (32000, width),
    }

    def linear(name, out, into):
        return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}

    def norm(name, size):
        return {f"{name}.weight": (size,), f"{name}.bias": (size,)}

    seen, summed = "model.vision_model.", "model.visual_abstractor."
    shapes |= {f"{seen}embeddings.cls_token": (1, 1, eye), f"{seen}embeddings.position_embedding": (1, 17, eye)}
    shapes |= {f"{seen}embeddings.patch_embed.weight": (eye, 3, 14, 14), f"{summed}query_embeds": (1, queries, eye)}
    shapes |= {f"{summed}vit_eos": (1, 1, width), **linear(f"{summed}visual_fc", width, eye)}
    shapes |= norm(f"{seen}embeddings.pre_layernorm", eye) | norm(f"{seen}post_layernorm", eye)
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name in (
            "q_proj",
            "k_proj.multiway.0",
            "k_proj.multiway.1",
            "v_proj.multiway.0",
            "v_proj.multiway.1",
            "o_proj",
        ):
            shapes[f"{layer}self_attn.{name}.weight"] = (width, width)
        for name, size in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            shapes[f"{layer}mlp.{name}_proj.weight"] = size
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{layer}{name}.multiway.{way}.weight": (width,) for way in (0, 1)}
        block = f"{seen}encoder.layers.{i}."
        shapes |= linear(f"{block}self_attn.query_key_value", 3 * eye, eye) | linear(
            f"{block}self_attn.dense", eye, eye
        )
        shapes |= linear(f"{block}mlp.fc1", eye_inner, eye) | linear(f"{block}mlp.fc2", eye, eye_inner)
        shapes |= norm(f"{block}input_layernorm", eye) | norm(f"{block}post_attention_layernorm", eye)
        cross = f"{summed}encoder.layers.{i}.crossattention."
        shapes |= norm(f"{cross}norm1", eye) | norm(f"{cross}normk", eye) | norm(f"{cross}output.norm2", eye)
        shapes |= {f"{cross}attention.q_pos_embed": (queries, eye), f"{cross}attention.k_pos_embed": (17, eye)}
        for name in ("query", "key", "value"):
            shapes |= linear(f"{cross}attention.{name}", eye, eye)
        mlp = f"{cross}output.mlp."
        shapes |= linear(f"{cross}output.out_proj", eye, eye) | linear(f"{mlp}w2", eye, eye_inner)
        shapes |= (
            linear(f"{mlp}w1", eye_inner, eye) | linear(f"{mlp}w3", eye_inner, eye) | norm(f"{mlp}ffn_ln", eye_inner)
        )
    return drawn(shapes)


def save_deqa(folder):
    (folder / "config.json").write_text(json.dumps(DEQA))
    CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}).save_pretrained(folder)
    torch.save(deqa_weights(), folder / "pytorch_model.bin")
    return folder


def options(name, folder):
    """Save a tiny model in `folder`, and return the options with which `name` holds it."""
    folder.mkdir(exist_ok=True)
    if name in ("clip_score", "pickscore"):
        return {"path": str(save_clip(folder))}
    if name in ("image_similarity", "diversity"):
        return {"path": str(save_dino(folder))}
    if name == "vqa_score":
        from tiny_asked import save_qwen

        return {"path": str(save_qwen(folder)), "dtype": "float32"}
    if name == "aesthetic_v25":
        return {"path": str(save_siglip(folder)), "head": str(folder / "head.pth")}
    if name == "deqa":
        return {"path": str(save_deqa(folder)), "dtype": "float32"}
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
    "clap", "vqa_score", "aesthetic_v25", "deqa",
)  # fmt: skip
