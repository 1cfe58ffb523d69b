"""Similarity of a picture, or of a video's frames, and the prompt by a CLIP of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import CLIPModel

from rewards.base import RewardError
from rewards.models.model import PairedReward, encode_unique, pooled_features
from rewards.video import check_videos


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


class VideoPickScore(PickScore):
    """PickScore of videos: the mean over frames scored as pictures; motion does not count.

    Flow-Factory trains video models on the mean over all frames divided by 26, UniRL's configs on the first frame alone.

        rewards: [{use: video_pickscore, weight: 0.0385, options: {frames: 8}}]

    Args:
        frames: number of evenly spaced frames of each video; 1 is the first.
        options: those of `pickscore`.
    """

    called = "video_pickscore"

    def __init__(self, path: str | None = None, *, frames: int = 8, **options: Any) -> None:
        if not isinstance(frames, int) or frames < 1:
            raise RewardError(f"{self.called}: frames is {frames!r}, but must be 1 or more")
        super().__init__(path, **options)
        self.frames = frames

    def __call__(self, videos: torch.Tensor, prompts: Sequence[str]) -> list[float]:
        """Return one score per video, float (B, F, 3, H, W) in [0, 1]."""
        check_videos(self.called, videos)
        chosen = torch.linspace(0, videos.shape[1] - 1, self.frames).round().long().unique()
        frames = videos[:, chosen.to(videos.device)]
        repeated = [prompt for prompt in prompts for _ in chosen]
        return torch.tensor(super().__call__(frames.flatten(0, 1), repeated)).view(len(videos), -1).mean(1).tolist()
