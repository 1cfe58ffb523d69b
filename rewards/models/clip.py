"""Similarity of a picture and the prompt by a CLIP of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers import CLIPModel

from rewards.models.model import PairedReward, encode_unique, pooled_features


class _Clip(PairedReward):
    def _load(self) -> nn.Module:
        return self.load_pretrained(CLIPModel)

    def _embed(self, images: torch.Tensor, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        features = pooled_features(self.model.get_image_features(pixel_values=self.pixels(images)))
        length = self.model.config.text_config.max_position_embeddings
        return features, encode_unique(partial(self.text_features, max_length=length), prompts)


class ClipScore(_Clip):
    """CLIPScore: 2.5 max(cos(image, prompt), 0) of CLIP features (Hessel et al., 2104.08718), 0 to 2.5, mostly 0.4 to 0.9.

    The prompt is used without the paper's prefix "A photo depicts"; torchmetrics does the same and multiplies by 40.

        rewards: [{use: clip_score, options: {path: openai/clip-vit-large-patch14, batch_size: 16, dtype: bfloat16}}]

    Args:
        path: a folder or a hub id of a CLIP with its tokenizer and image processor.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16.
    """

    called = "clip_score"
    weights = "openai/clip-vit-large-patch14"

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return 2.5 * self.cosine(images, prompts).clamp(min=0)


class PickScore(_Clip):
    """PickScore: exp(logit_scale) cos(image, prompt) of a CLIP ViT-H/14 trained on people's choices (Kirstain, 2305.01569).

    In -100 to 100, in practice 16 to 26. Flow-GRPO divides it by 26 in training: `weight: 0.0385` does the same.

        rewards: [{use: pickscore, options: {batch_size: 16, dtype: bfloat16}}]

    Args:
        path: a folder or a hub id of PickScore with its tokenizer and image processor.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16.
    """

    called = "pickscore"
    weights = "yuvalkirstain/PickScore_v1"

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return self.model.logit_scale.float().exp() * self.cosine(images, prompts)
