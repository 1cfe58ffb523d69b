"""ImageReward: the authors' checkpoint on the BLIP of transformers.

The authors' package has its own BLIP, which does not import beside transformers 5. Its networks equal those of transformers
under other names, so weights are renamed, and sizes are read from the weights. As in the authors' code, layer norms of the
vision network have eps 1e-6, and heads are 64 wide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from rewards.models.model import PictureReward, aesthetic_head, load_weights, select_weights
from rewards.models.preprocessing import Preprocessing

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the scores on the authors' training data
LONGEST_PROMPT = 35  # tokens
HEAD_WIDTH = 64

# The authors' names of the vision network -> those of transformers; names of the text network are equal.
VISION_NAMES = {
    r"^cls_token$": "embeddings.class_embedding",
    r"^pos_embed$": "embeddings.position_embedding",
    r"^patch_embed\.proj\.": "embeddings.patch_embedding.",
    r"^blocks\.": "encoder.layers.",
    r"\.norm([12])\.": r".layer_norm\1.",
    r"\.attn\.qkv\.": ".self_attn.qkv.",
    r"\.attn\.proj\.": ".self_attn.projection.",
    r"^norm\.": "post_layernorm.",
}


class ImageReward(PictureReward):
    """ImageReward: a BLIP that reads the prompt with the picture, trained on people's rankings (2304.05977).

    (head(h) - 0.167) / 1.033, where h is the first text token after cross-attention to the picture: about -2.3 to 2, with
    mean 0 and deviation 1 on the authors' data.

        rewards: [{use: image_reward, options: {batch_size: 16, dtype: bfloat16}}]

    Args:
        path: a file, or a folder or hub id with ImageReward.pt.
        tokenizer: a folder or a hub id of BERT's uncased tokenizer.
        batch_size, dtype: of the BLIP; dtype is float32, bfloat16 or float16. The head is float32.
    """

    called = "image_reward"
    weights = "THUDM/ImageReward"

    def __init__(
        self, path: str | None = None, tokenizer: str = "google-bert/bert-base-uncased", **options: Any
    ) -> None:
        super().__init__(path, **options)
        self.tokenizer_path = str(tokenizer)  # the checkpoint has none

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """CLIP's preprocessing at the size of the weights."""
        size = (self.model["vision"].config.image_size,) * 2
        return Preprocessing(size, "cover", size, mean=OPENAI_CLIP_MEAN, std=OPENAI_CLIP_STD)

    def _load(self) -> nn.Module:
        weights = load_weights(self.file("ImageReward.pt"))
        head = aesthetic_head(select_weights(weights, "mlp.layers."))
        vision = {_rename(name): value for name, value in select_weights(weights, "blip.visual_encoder.").items()}
        text = select_weights(weights, "blip.text_encoder.")
        text.pop("embeddings.position_ids", None)
        eye, reader = BlipVisionModel(vision_config(vision)), BlipTextModel(text_config(text), add_pooling_layer=False)
        eye.load_state_dict(vision)
        reader.load_state_dict(text)
        return nn.ModuleDict({"vision": eye.to(self.dtype), "text": reader.to(self.dtype), "head": head})

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        limits = {"padding": True, "truncation": True, "max_length": LONGEST_PROMPT}
        tokens = self.tokenizer(prompts, return_tensors="pt", **limits).to(self.device)
        picture = self.model["vision"](pixel_values=self.pixels(images)).last_hidden_state
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        output = self.model["text"](ids, attention_mask=mask, encoder_hidden_states=picture)
        return (self.model["head"](output.last_hidden_state[:, 0].float()).squeeze(-1) - MEAN) / STD


def _rename(name: str) -> str:
    for pattern, replacement in VISION_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def vision_config(weights: dict[str, torch.Tensor]) -> BlipVisionConfig:
    """Return the configuration of the vision network, read from its renamed weights."""
    width, _, patch, _ = weights["embeddings.patch_embedding.weight"].shape
    patches = weights["embeddings.position_embedding"].shape[1] - 1
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=weights["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(weights, "encoder.layers."),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=round(patches**0.5) * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,
    )


def text_config(weights: dict[str, torch.Tensor]) -> BlipTextConfig:
    """Return the configuration of the text network, read from its weights."""
    words, width = weights["embeddings.word_embeddings.weight"].shape
    return BlipTextConfig(
        vocab_size=words,
        hidden_size=width,
        encoder_hidden_size=weights["encoder.layer.0.crossattention.self.key.weight"].shape[1],
        intermediate_size=weights["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_layers(weights, "encoder.layer."),
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=weights["embeddings.position_embeddings.weight"].shape[0],
    )


def _layers(weights: dict[str, torch.Tensor], prefix: str) -> int:
    return 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in weights if name.startswith(prefix))
