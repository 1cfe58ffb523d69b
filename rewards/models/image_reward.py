"""ImageReward: the authors' checkpoint on the BLIP of transformers.

The authors' package brings its own BLIP, which no longer imports beside transformers 5. Its networks are those of
transformers' BLIP under other names, so here the names are translated, and the sizes read off the weights. Departures
from transformers' defaults, after the authors' code: layer norms of the picture have eps 1e-6, a head is 64 wide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel, PreTrainedTokenizerBase
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from rewards.models.model import PictureReward, laion_aesthetic_head, part_of, weights_of
from rewards.models.preprocessing import Preprocessing

# Of the scores on the authors' training data; a reward is (score - MEAN) / STD.
MEAN, STD = 0.16717362830052426, 1.0333394966054072
LONGEST_PROMPT = 35  # tokens
HEAD_WIDTH = 64

# The authors' names of the picture's network -> those of transformers; the text's are the same in both.
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
    """ImageReward: a BLIP that reads the prompt with the picture before it, trained on people's rankings (2304.05977).

    (head(h) - 0.167) / 1.033, with h the first token of the text after cross-attention to the picture: about -2.3 to 2,
    mean 0 and deviation 1 on the authors' data.

        rewards: [{use: image_reward, options: {batch_size: 16, dtype: bfloat16}}]

    Args:
        path: of the weights: a file, or a folder or hub id that holds ImageReward.pt.
        tokenizer: BERT's uncased tokenizer: a folder or a hub id.
        batch_size: pictures at a time.
        dtype: of the BLIP: float32, bfloat16 or float16; the head is float32.
    """

    called = "image_reward"
    weights = "THUDM/ImageReward"

    def __init__(
        self, path: str | None = None, tokenizer: str = "google-bert/bert-base-uncased", **options: Any
    ) -> None:
        super().__init__(path, **options)
        self.tokenizer_path = str(tokenizer)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """BERT's, from where the option says: the checkpoint has none."""
        return self.tokenizer_at(self.tokenizer_path)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """CLIP's, at the size of the weights."""
        size = (self.model["vision"].config.image_size,) * 2
        return Preprocessing(size, "cover", size, mean=OPENAI_CLIP_MEAN, std=OPENAI_CLIP_STD)

    def _load(self) -> nn.Module:
        weights = weights_of(self.file("ImageReward.pt"))
        head = laion_aesthetic_head(part_of(weights, "mlp.layers."))
        vision = translated(part_of(weights, "blip.visual_encoder."))
        text = part_of(weights, "blip.text_encoder.")
        text.pop("embeddings.position_ids", None)
        networks = BlipVisionModel(vision_config(vision)), BlipTextModel(text_config(text), add_pooling_layer=False)
        for network, part in zip(networks, (vision, text), strict=True):
            network.load_state_dict(part)
        return nn.ModuleDict({"vision": networks[0].to(self.dtype), "text": networks[1].to(self.dtype), "head": head})

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        tokens = self.tokenizer(
            prompts, padding=True, truncation=True, max_length=LONGEST_PROMPT, return_tensors="pt"
        ).to(self.device)
        read = self.model["text"](
            tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=self.model["vision"](pixel_values=self.pixels(images)).last_hidden_state,
        )
        return (self.model["head"](read.last_hidden_state[:, 0].float()).squeeze(-1) - MEAN) / STD


def translated(vision: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The picture's weights under transformers' names."""
    return {_renamed(name): value for name, value in vision.items()}


def _renamed(name: str) -> str:
    for pattern, replacement in VISION_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def vision_config(weights: dict[str, torch.Tensor]) -> BlipVisionConfig:
    """The sizes of the picture's network, read off its weights under transformers' names."""
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
    """The sizes of the text's network, read off its weights."""
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
